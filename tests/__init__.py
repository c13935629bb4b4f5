import os

# No test reaches the Hugging Face Hub; test_hub.py has one of its own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
