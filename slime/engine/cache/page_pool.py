"""Reference counts of KV cache pages: which are free, in use, or evictable."""

from __future__ import annotations


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
