"""The tests. Helpers are beside the tests that use them, or in ``tests/shared`` if three or more folders use them."""
