"""The pieces of a decoder: attention, MLP, norms, rotary embedding."""
