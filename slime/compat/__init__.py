"""Names and forms that hooks of earlier versions of slime use, in terms of today's functions.

The modules that hooks import (`slime.utils.http_utils`, `slime.utils.misc`, ...) are re-exports of this
package. A run imports it only when a hook asks for one of its names. `docs/migrating.md` lists them.
"""
