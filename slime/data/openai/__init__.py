"""OpenAI's HTTP protocol, shared by the embedded engine and the recording endpoint."""
