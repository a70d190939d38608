"""What scripts/synthesize.py writes: random blocks, vocabularies, and the shapes of known models."""
