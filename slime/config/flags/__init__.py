"""All flags as data: slime's own, and the tables of Megatron's, SGLang's and the router's."""
