"""Progress for people."""
