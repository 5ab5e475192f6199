"""The benchmark of a step's matrix products: whose they are, and what is measured of them."""

import json
import sys

import jax
import numpy as np
import pytest

from benchmarks import bench_products
from benchmarks.bench_products import Product, Way, products_of, ways
from benchmarks.shapes import SHAPES, StepBytes
from pagedjax.layers.linear import MANY_TOKENS


@pytest.mark.parametrize("shape", ["llama2-13b", "llama3.1-8b", "qwen3-0.6b"])
def test_the_products_read_all_weights_of_a_step_but_the_norms(shape):
    """Whose bytes are counted from the parameters; norms are under a tenth of a percent."""
    arch = SHAPES[shape]
    *layer, head = [product.outputs * product.inner for product in products_of(arch)]
    read = 2 * (arch.layers * sum(layer) + head)
    assert read == pytest.approx(StepBytes.of(arch, 2, batch=1, context=1).weights, rel=1e-3)


def test_only_what_the_next_kernel_adds_up_is_timed_in_pieces(monkeypatch):
    whole, divisible = Product("a", 64, 96, False), Product("b", 64, 96, True)
    assert list(ways(whole, [1, 2])) == [Way(1, False)]
    assert list(ways(divisible, [1, 2, 64])) == [Way(1, False), Way(2, False)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    both = [Way(1, False), Way(1, True)]
    assert list(ways(whole, [1, 2])) == both
    assert list(ways(divisible, [1, 2])) == [*both, Way(2, False), Way(2, True)]


def test_what_a_step_does_is_chosen(monkeypatch):
    product = Product("down", 4096, 14336, True)
    assert Way.chosen(product, 64) == Way(1, False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert Way.chosen(product, 64) == Way(2, False)
    assert Way.chosen(product, 32) == Way(2, True)
    assert Way.chosen(product, MANY_TOKENS) == Way(1, True)
    assert Way.chosen(Product("head", 4096, 14336, False), 64) == Way(1, False)


@pytest.mark.parametrize("pieces", [1, 4])
def test_what_is_timed_are_the_products_of_different_weights(pieces):
    product = Product("out", 24, 32, True)
    code = bench_products.compiled(product, 3, Way(pieces, False), np.dtype(np.float32), copies=2)
    rng = np.random.default_rng(pieces)
    xs, weights = ([rng.normal(size=(n, 32)).astype(np.float32) for _ in "ab"] for n in (3, 24))
    for out, x, weight in zip(code(xs, weights), xs, weights, strict=True):
        assert out.shape == (pieces, 3, 24)
        np.testing.assert_allclose(np.asarray(out).sum(axis=0), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_dry_run_writes_a_line_for_every_way(tmp_path, monkeypatch, capsys):
    out = tmp_path / "lines.jsonl"
    call = f"x --shape tiny --dtype float32 --rows 2,4 --products out,head --out {out}"
    monkeypatch.setattr(sys, "argv", [*call.split(), "--seconds", "0.001", "--pieces", "1,2"])
    bench_products.main()
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(r["rows"], r["outputs"], r["pieces"]) for r in lines] == [
        (rows, *way) for rows in (2, 4) for way in ((64, 1), (64, 2), (512, 1))
    ]
    assert [r["chosen"] for r in lines] == [True, False, True] * 2
    assert all(r["median_us"] > 0 and r["bench"] == "products" for r in lines)
    monkeypatch.setattr(sys, "argv", ["x", "--products", "qkv,up"])
    with pytest.raises(SystemExit, match="'up' is none of qkv, out, gate_up, down, head"):
        bench_products.main()
