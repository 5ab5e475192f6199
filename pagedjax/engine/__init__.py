"""The loop: scheduler decides, runner computes, requests get their tokens."""
