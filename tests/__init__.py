"""The tests. Helpers stand beside the tests that use them; what three or more folders use is in ``tests/shared``."""
