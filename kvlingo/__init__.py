"""KV-Lingo: hand a conversation from one language model to another by translating its key-value cache."""

__version__ = "0.1.0"
