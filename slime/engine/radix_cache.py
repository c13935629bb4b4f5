"""Pages of the KV cache and saved recurrent states: reference counts, and the prefix cache that shares them."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field


class PagePool:
    """Pages 1..num_pages; page 0 is the padding page, which padding tokens write to.

    Each request that uses a page and the prefix cache hold one reference each. A page referenced only by
    the prefix cache is evictable: it counts as available, but must be evicted before it is allocated.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evictable = 0
        self._free = list(range(num_pages, 0, -1))
        self._references = [0] * (num_pages + 1)
        self._cached = [False] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        return len(self._free) + self.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free pages with one reference each; the caller has checked that they exist."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages requested, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def hold(self, pages: list[int]) -> None:
        """Add the reference of one more request."""
        for page in pages:
            if self._references[page] == 1 and self._cached[page]:
                self.num_evictable -= 1
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop the reference of one request; unreferenced pages become free."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
            elif self._references[page] == 1 and self._cached[page]:
                self.num_evictable += 1

    def hold_for_cache(self, page: int) -> None:
        self._references[page] += 1
        self._cached[page] = True

    def release_from_cache(self, page: int) -> None:
        if self._references[page] == 1:
            self.num_evictable -= 1
        self._cached[page] = False
        self.release([page])

    def is_evictable(self, page: int) -> bool:
        return self._cached[page] and self._references[page] == 1


class StatePool:
    """Rows for saved recurrent states; see kv_cache.py.

    A row is free, held by a running request, or at a node of the prefix cache. When none is free, the node
    whose state was used least recently loses it; its page stays.
    """

    def __init__(self, rows: range) -> None:
        self._free = list(reversed(rows))
        self._nodes: OrderedDict[int, _Node] = OrderedDict()  # by row, least recently used first

    def take(self) -> int | None:
        """Return a row to write to; None if running requests hold them all."""
        if self._free:
            return self._free.pop()
        if not self._nodes:
            return None
        row, node = self._nodes.popitem(last=False)
        node.state = None
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def attach(self, node: _Node, row: int) -> None:
        node.state = row
        self._nodes[row] = node

    def touch(self, row: int) -> None:
        self._nodes.move_to_end(row)

    def detach(self, node: _Node) -> None:
        """Free the row of a node that is removed, if it has one."""
        if node.state is not None:
            del self._nodes[node.state]
            self._free.append(node.state)
            node.state = None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The cached prefix of a request.

    Three pages of its tokens are cached, and the state after the second was saved in row 9::

        pages = [4, 7]     state = 9     seen = [4, 7, 3]
    """

    pages: list[int]
    state: int | None = None  # row of the saved state after these pages
    seen: list[int] = field(default_factory=list)  # also the pages after the saved state


class RadixCache:
    """Finds the cached pages of a prefix, and evicts the least recently used ones.

    A node is one full page; the path to it is the prefix before it, so equal pages after different prefixes
    are different nodes. A request that holds a page also holds those before it, so evictable nodes always
    form whole subtrees.
    """

    def __init__(self, pool: PagePool, states: StatePool | None = None) -> None:
        self._pool = pool
        self._states = states  # of models with recurrent layers
        self._root = _Node(page=0, parent=None, key=())
        self._clock = itertools.count(1)
        self._size = 0
        self.epoch = 0  # incremented by `clear`; pages of earlier epochs must not be inserted

    def __len__(self) -> int:
        return self._size

    def find(self, token_ids: list[int], limit: int, adapter: int = 0) -> Prefix:
        """Return the longest prefix cached with this adapter that can be reused, at most `limit` tokens.

        With recurrent layers it ends at a node with a saved state.
        """
        node, pages, now = self._root, [], next(self._clock)
        state, num_usable = None, 0
        for key in self._keys(token_ids, limit, adapter):
            child = node.children.get(key)
            if child is None:
                break
            child.last_used = now
            pages.append(child.page)
            node = child
            if node.state is not None:
                state, num_usable = node.state, len(pages)
        if self._states is None:
            return Prefix(pages=pages, seen=pages)
        if state is not None:
            self._states.touch(state)
        return Prefix(pages=pages[:num_usable], state=state, seen=pages)

    def attach_state(self, token_ids: list[int], count: int, row: int, adapter: int = 0) -> bool:
        """Attach a saved state after the first `count` tokens (whole pages); return whether it was attached."""
        node = self._node_after(token_ids, count, adapter)
        if self._states is None or node is None or node.state is not None:
            return False
        self._states.attach(node, row)
        return True

    def lacks_state(self, token_ids: list[int], count: int, adapter: int = 0) -> bool:
        """Return whether there is a node after the first `count` tokens without a saved state."""
        node = self._node_after(token_ids, count, adapter)
        return node is not None and node.state is None

    def _node_after(self, token_ids: list[int], count: int, adapter: int) -> _Node | None:
        node = self._root
        for key in self._keys(token_ids, count, adapter):
            child = node.children.get(key)
            if child is None:
                return None
            node = child
        return node

    def insert(
        self,
        token_ids: list[int],
        pages: list[int],
        num_computed: int,
        *,
        in_use: bool = False,
        adapter: int = 0,
    ) -> None:
        """Insert `pages`, which hold the first `num_computed` tokens; only full pages are kept.

        If the tree already has a page for the same tokens, it keeps that page, and the given one stays with
        its request. With `in_use` insertion stops there: the request does not hold the page in the tree,
        which would count as evictable while its descendants are not.
        """
        node, now = self._root, next(self._clock)
        for key, page in zip(self._keys(token_ids, num_computed, adapter), pages, strict=False):
            child = node.children.get(key)
            if in_use and child is not None and child.page != page:
                return
            if child is None:
                child = _Node(page=page, parent=node, key=key)
                node.children[key] = child
                self._pool.hold_for_cache(page)
                self._size += 1
            child.last_used = now
            node = child

    def evict(self, count: int) -> int:
        """Free up to `count` pages that no request uses, least recently used leaves first; return how many."""
        leaves = [(n.last_used, id(n), n) for n in self._nodes() if self._is_evictable_leaf(n)]
        heapq.heapify(leaves)
        evicted = 0
        while leaves and evicted < count:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self._drop_state(node)
            self._pool.release_from_cache(node.page)
            self._size -= 1
            evicted += 1
            if self._is_evictable_leaf(parent):
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return evicted

    def clear(self) -> None:
        """Remove everything; pages in use stay with their requests but cannot be inserted again."""
        for node in list(self._nodes()):
            self._drop_state(node)
            self._pool.release_from_cache(node.page)
        self._root.children.clear()
        self._size = 0
        self.epoch += 1

    def _drop_state(self, node: _Node) -> None:
        if self._states is not None:
            self._states.detach(node)

    def _keys(self, token_ids: list[int], limit: int, adapter: int) -> Iterator[tuple[int, ...]]:
        """Yield the key of each full page: its tokens; the first key starts with the adapter's number, if any."""
        size = self._pool.page_size
        for start in range(0, limit - size + 1, size):
            key = tuple(token_ids[start : start + size])
            yield (adapter, *key) if adapter and start == 0 else key

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _is_evictable_leaf(self, node: _Node) -> bool:
        return not node.children and node.parent is not None and self._pool.is_evictable(node.page)


class _Node:
    __slots__ = ("children", "key", "last_used", "page", "parent", "state")

    def __init__(self, *, page: int, parent: _Node | None, key: tuple[int, ...]) -> None:
        self.page = page
        self.parent = parent
        self.key = key
        self.children: dict[tuple[int, ...], _Node] = {}
        self.last_used = 0
        self.state: int | None = None  # row of a saved state
