from tests.e2e.conftest import tiny_data, tiny_model

__all__ = ["tiny_data", "tiny_model"]
