"""The parts of OpenAI's HTTP protocol that the embedded engine and the recording endpoint share."""
