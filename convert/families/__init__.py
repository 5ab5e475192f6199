"""One file per model family: how its configuration and tensor names are read."""
