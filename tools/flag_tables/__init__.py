"""Readers of other packages' flags: their sources as text, nothing imported from them."""
