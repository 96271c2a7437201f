"""Examples to learn from: made, embedded, fetched, or the user's own. Knows no model."""
