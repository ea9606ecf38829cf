"""A translator inside another engine: kept caches, what fits them, and what is made of them. No engine is imported here."""
