"""The page in a real browser, and its pure parts under Node."""
