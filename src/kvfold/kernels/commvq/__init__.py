"""Sums of codes whose angles are known: CommVQ."""
