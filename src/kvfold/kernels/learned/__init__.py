"""Keys of learned codebooks beside values of fold: TaSQ."""
