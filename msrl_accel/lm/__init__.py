"""Language models: decoder-only Cells, generation, weights from disk, losses and updates."""
