"""Scripts that run inside the sandbox, started by file path: none of them imports slime."""
