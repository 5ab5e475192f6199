"""Read Hugging Face and GGUF checkpoints; write the native one."""
