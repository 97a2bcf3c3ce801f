"""What a layer holds: who has how many tokens, packed slabs, windows in full precision, and who writes them."""
