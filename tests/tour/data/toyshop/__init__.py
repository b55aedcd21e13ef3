"""A package small enough to damage in tests."""
