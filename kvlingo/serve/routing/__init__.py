"""Who answers when a request leaves it open: one file a router, and what fits and compares them."""
