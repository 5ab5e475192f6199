"""What a model is (`arch`) and the one decoder that runs it."""
