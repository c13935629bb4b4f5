"""Every flag slime knows, as data: slime's own groups, and the tables of Megatron, SGLang and its router."""
