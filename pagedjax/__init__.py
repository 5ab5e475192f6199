"""Fast LLM inference for people who live in JAX."""
