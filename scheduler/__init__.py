"""Host-side scheduling over a block-structured KV cache: standard library and numpy only."""
