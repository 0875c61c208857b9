"""Training by several processes that each hold a part of every batch (docs/scale-out.md)."""
