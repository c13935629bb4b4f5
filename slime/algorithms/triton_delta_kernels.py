"""Kernels of triton_delta_rule.py, which has the formulas: one program per chunk and value head, or per
sample, value head and block of value columns in the two scans over chunks."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def _tokens_of(starts, chunks, chunk, CHUNK: tl.constexpr):
    """Return the tokens of a chunk, and a mask without those past the end of its sample."""
    sample, number = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    tokens = tl.load(starts + sample) + number * CHUNK + tl.arange(0, CHUNK)
    return tokens, tokens < tl.load(starts + sample + 1)


@triton.jit
def _tile(start, i, j, i_stride, j_stride, in_i, in_j):
    """Load [i, j], with zeros outside."""
    at = start + i[:, None] * i_stride + j[None, :] * j_stride
    return tl.load(at, mask=in_i[:, None] & in_j[None, :], other=0.0)


@triton.jit
def _put(start, i, j, i_stride, in_i, in_j, x):
    at = start + i[:, None] * i_stride + j[None, :]
    tl.store(at, x.to(start.dtype.element_ty), mask=in_i[:, None] & in_j[None, :])


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _pairs(a, b, tokens, real, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return a_i . b_j for all tokens i and j of a chunk."""
    total = tl.zeros([tokens.shape[0], tokens.shape[0]], tl.float32)
    for at in range(0, DIM, BLOCK):
        d = at + tl.arange(0, BLOCK)
        x = _tile(a, tokens, d, STRIDE, 1, real, d < DIM)
        total += _dot(x, _tile(b, d, tokens, 1, STRIDE, d < DIM, real))
    return total


@triton.jit
def _sums_of(sums, tokens, real, head, HEADS: tl.constexpr):
    """Return c, the sums of decays in a chunk, and the last, which is the padding: exp(0 - c) would overflow."""
    c = tl.load(sums + tokens * HEADS + head, mask=real, other=float("inf"))
    last = tl.min(c, 0)
    return tl.where(real, c, last), last


@triton.jit
def _decay_between(c, KEEP: tl.constexpr):
    """Return exp(c_i - c_j) where j <= i, or its transpose, exp(c_j - c_i) where j >= i; else 0."""
    i = tl.arange(0, c.shape[0])[:, None]
    j = tl.arange(0, c.shape[0])[None, :]
    if KEEP == "lower":
        return tl.exp(tl.where(j <= i, c[:, None] - c[None, :], float("-inf")))
    return tl.exp(tl.where(j >= i, c[None, :] - c[:, None], float("-inf")))


@triton.jit
def prepare_kernel(
    key, value, decay, beta, starts, chunks,
    sums,  # [T, HEADS] out: c
    inverse,  # [T, HEADS, CHUNK] out: X
    u,  # [T, HEADS, VALUE_DIM] out
    w,  # [T, HEADS, KEY_DIM] out
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tokens, real = _tokens_of(starts, chunks, tl.program_id(0), CHUNK)
    keys = key + (head // (HEADS // KEY_HEADS)) * KEY_DIM
    i = tl.arange(0, CHUNK)
    BLOCKS: tl.constexpr = CHUNK // 16

    c = tl.cumsum(tl.load(decay + tokens * HEADS + head, mask=real, other=0.0), 0)
    b = tl.load(beta + tokens * HEADS + head, mask=real, other=0.0).to(tl.float32)
    tl.store(sums + tokens * HEADS + head, c, mask=real)

    kk = _pairs(keys, keys, tokens, real, KEY_HEADS * KEY_DIM, KEY_DIM, KEY_BLOCK)
    # Forward substitution inverts the diagonal blocks of 16, one row of each at a time.
    row, column = i[:, None], i[None, :]
    same_block = row // 16 == column // 16
    x = tl.where(same_block & (column > row), kk * b[None, :] * _decay_between(c, "upper"), 0.0)
    transposed = tl.sum(tl.reshape(x, BLOCKS, 16, BLOCKS, 16), 2)  # the other blocks are zero
    m, n = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    diagonal = tl.where(m == n, 1.0, tl.zeros([BLOCKS, 16, 16], tl.float32))
    for next_row in range(1, 16):
        factors = tl.sum(tl.where(n == next_row, transposed, 0.0), 2)
        new = tl.sum(factors[:, :, None] * diagonal, 1)
        diagonal -= tl.where(m == next_row, new[:, None, :], 0.0)
    x = tl.broadcast_to(diagonal[:, :, None, :], BLOCKS, 16, BLOCKS, 16)
    x = tl.where(same_block, tl.reshape(x, CHUNK, CHUNK), 0.0)
    # 1 + A = x^-1 (1 + x L) with L below those blocks, and (x L)^4 = 0.
    below = tl.where(same_block | (column > row), 0.0, kk * b[:, None] * _decay_between(c, "lower"))
    dtype = u.dtype.element_ty
    # The result is rounded to the dtype of u, and bfloat16 has fewer bits than TF32.
    PRECISION: tl.constexpr = "tf32" if dtype == tl.bfloat16 else "tf32x3"
    below = tl.dot(x, below, input_precision=PRECISION)
    solved = x
    for _ in range(BLOCKS - 1):
        solved = x - tl.dot(below, solved, input_precision=PRECISION)

    solved = solved.to(dtype)
    _put(inverse + head * CHUNK, tokens, i, HEADS * CHUNK, real, i < CHUNK, solved)
    for at in range(0, VALUE_DIM, VALUE_BLOCK):
        d = at + tl.arange(0, VALUE_BLOCK)
        v = _tile(value + head * VALUE_DIM, tokens, d, HEADS * VALUE_DIM, 1, real, d < VALUE_DIM)
        out = _dot(solved, (v * b[:, None]).to(dtype))
        _put(u + head * VALUE_DIM, tokens, d, HEADS * VALUE_DIM, real, d < VALUE_DIM, out)
    factor = b * tl.exp(c)
    for at in range(0, KEY_DIM, KEY_BLOCK):
        d = at + tl.arange(0, KEY_BLOCK)
        k = _tile(keys, tokens, d, KEY_HEADS * KEY_DIM, 1, real, d < KEY_DIM)
        out = _dot(solved, (k * factor[:, None]).to(dtype))
        _put(w + head * KEY_DIM, tokens, d, HEADS * KEY_DIM, real, d < KEY_DIM, out)


@triton.jit
def state_kernel(
    key, sums, u, w, starts, first_chunks,
    first,  # [N, HEADS, KEY_DIM, VALUE_DIM] or None
    last,  # like first, out
    states,  # [chunks, HEADS, KEY_DIM, VALUE_DIM] out: S before each chunk
    written,  # [T, HEADS, VALUE_DIM] out: D
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    keys = key + (head // (HEADS // KEY_HEADS)) * KEY_DIM
    d, v = tl.arange(0, KEY_BLOCK), tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_d, in_v = d < KEY_DIM, v < VALUE_DIM
    start, end = tl.load(starts + sample), tl.load(starts + sample + 1)
    chunk = tl.load(first_chunks + sample)
    dtype = written.dtype.element_ty
    at_ends = (sample * HEADS + head) * (KEY_DIM * VALUE_DIM)
    state = tl.zeros([KEY_BLOCK, VALUE_BLOCK], tl.float32)
    if HAS_ENDS:
        state = _tile(first + at_ends, d, v, VALUE_DIM, 1, in_d, in_v)
    while start < end:
        tokens = start + tl.arange(0, CHUNK)
        real = tokens < end
        at = states + (chunk * HEADS + head) * (KEY_DIM * VALUE_DIM)
        _put(at, d, v, VALUE_DIM, in_d, in_v, state)
        reads = _tile(w + head * KEY_DIM, tokens, d, HEADS * KEY_DIM, 1, real, in_d)
        new = _tile(u + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, 1, real, in_v)
        new = new - _dot(reads, state.to(dtype))
        _put(written + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, real, in_v, new)
        c, final = _sums_of(sums, tokens, real, head, HEADS)
        k = _tile(keys, d, tokens, 1, KEY_HEADS * KEY_DIM, in_d, real)
        k = (k * tl.exp(final - c)[None, :]).to(dtype)
        state = state * tl.exp(final) + _dot(k, new.to(dtype))
        start += CHUNK
        chunk += 1
    if HAS_ENDS:
        _put(last + at_ends, d, v, VALUE_DIM, in_d, in_v, state)


@triton.jit
def output_kernel(
    query, key, sums, states, written, starts, chunks,
    out,  # [T, HEADS, VALUE_DIM]
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens, real = _tokens_of(starts, chunks, chunk, CHUNK)
    at_head = (head // (HEADS // KEY_HEADS)) * KEY_DIM
    queries, keys = query + at_head, key + at_head
    dtype = out.dtype.element_ty
    c, _ = _sums_of(sums, tokens, real, head, HEADS)
    qk = _pairs(queries, keys, tokens, real, KEY_HEADS * KEY_DIM, KEY_DIM, KEY_BLOCK)
    within = (qk * _decay_between(c, "lower")).to(dtype)
    before = states + (chunk * HEADS + head) * (KEY_DIM * VALUE_DIM)
    for at_value in range(0, VALUE_DIM, VALUE_BLOCK):
        v = at_value + tl.arange(0, VALUE_BLOCK)
        in_v = v < VALUE_DIM
        total = tl.zeros([CHUNK, VALUE_BLOCK], tl.float32)
        for at in range(0, KEY_DIM, KEY_BLOCK):
            d = at + tl.arange(0, KEY_BLOCK)
            q = _tile(queries, tokens, d, KEY_HEADS * KEY_DIM, 1, real, d < KEY_DIM)
            total += _dot(q, _tile(before, d, v, VALUE_DIM, 1, d < KEY_DIM, in_v))
        new = _tile(written + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, 1, real, in_v)
        total = total * tl.exp(c)[:, None] + _dot(within, new)
        _put(out + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, real, in_v, total)


@triton.jit
def within_kernel(
    query, key, sums,
    grad,  # [T, HEADS, VALUE_DIM], of the output
    starts, chunks,
    within,  # [T, HEADS, VALUE_DIM] out: M^T grad
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tokens, real = _tokens_of(starts, chunks, tl.program_id(0), CHUNK)
    at_head = (head // (HEADS // KEY_HEADS)) * KEY_DIM
    queries, keys = query + at_head, key + at_head
    c, _ = _sums_of(sums, tokens, real, head, HEADS)
    kq = _pairs(keys, queries, tokens, real, KEY_HEADS * KEY_DIM, KEY_DIM, KEY_BLOCK)
    m = (kq * _decay_between(c, "upper")).to(within.dtype.element_ty)
    for at in range(0, VALUE_DIM, VALUE_BLOCK):
        v = at + tl.arange(0, VALUE_BLOCK)
        g = _tile(grad + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, 1, real, v < VALUE_DIM)
        out = _dot(m, g)
        _put(within + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, real, v < VALUE_DIM, out)


@triton.jit
def state_backward_kernel(
    query, key, sums, w, grad, within, starts, first_chunks,
    d_states,  # [chunks, HEADS, KEY_DIM, VALUE_DIM] out: gradient of S after each chunk
    d_written,  # [T, HEADS, VALUE_DIM] out: gradient of D
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    at_head = (head // (HEADS // KEY_HEADS)) * KEY_DIM
    queries, keys = query + at_head, key + at_head
    d, v = tl.arange(0, KEY_BLOCK), tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_d, in_v = d < KEY_DIM, v < VALUE_DIM
    start, end = tl.load(starts + sample), tl.load(starts + sample + 1)
    first, chunk = tl.load(first_chunks + sample), tl.load(first_chunks + sample + 1) - 1
    dtype = d_written.dtype.element_ty
    d_state = tl.zeros([KEY_BLOCK, VALUE_BLOCK], tl.float32)
    while chunk >= first:
        tokens = start + (chunk - first) * CHUNK + tl.arange(0, CHUNK)
        real = tokens < end
        at = d_states + (chunk * HEADS + head) * (KEY_DIM * VALUE_DIM)
        _put(at, d, v, VALUE_DIM, in_d, in_v, d_state)
        c, final = _sums_of(sums, tokens, real, head, HEADS)
        k = _tile(keys, tokens, d, KEY_HEADS * KEY_DIM, 1, real, in_d)
        k = (k * tl.exp(final - c)[:, None]).to(dtype)
        new = _tile(within + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, 1, real, in_v)
        new = (new + _dot(k, d_state.to(dtype))).to(dtype)
        _put(d_written + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, real, in_v, new)
        q = _tile(queries, d, tokens, 1, KEY_HEADS * KEY_DIM, in_d, real)
        q = (q * tl.exp(c)[None, :]).to(dtype)
        g = _tile(grad + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, 1, real, in_v)
        reads = _tile(w + head * KEY_DIM, d, tokens, 1, HEADS * KEY_DIM, in_d, real)
        d_state = d_state * tl.exp(final) + _dot(q, g) - _dot(reads, new)
        chunk -= 1


@triton.jit
def solve_backward_kernel(
    inverse, states, d_written, starts, chunks,
    p,  # [T, HEADS, VALUE_DIM] out: X^T dD
    r,  # [T, HEADS, KEY_DIM] out: X^T dW, where dW = -dD S^T
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens, real = _tokens_of(starts, chunks, chunk, CHUNK)
    i = tl.arange(0, CHUNK)
    x = _tile(inverse + head * CHUNK, i, tokens, 1, HEADS * CHUNK, i < CHUNK, real)
    before = states + (chunk * HEADS + head) * (KEY_DIM * VALUE_DIM)
    news = d_written + head * VALUE_DIM
    for at in range(0, VALUE_DIM, VALUE_BLOCK):
        v = at + tl.arange(0, VALUE_BLOCK)
        new = _tile(news, tokens, v, HEADS * VALUE_DIM, 1, real, v < VALUE_DIM)
        out = _dot(x, new)
        _put(p + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, real, v < VALUE_DIM, out)
    for at_key in range(0, KEY_DIM, KEY_BLOCK):
        d = at_key + tl.arange(0, KEY_BLOCK)
        total = tl.zeros([CHUNK, KEY_BLOCK], tl.float32)
        for at in range(0, VALUE_DIM, VALUE_BLOCK):
            v = at + tl.arange(0, VALUE_BLOCK)
            new = _tile(news, tokens, v, HEADS * VALUE_DIM, 1, real, v < VALUE_DIM)
            total -= _dot(new, _tile(before, v, d, 1, VALUE_DIM, v < VALUE_DIM, d < KEY_DIM))
        out = _dot(x, total.to(x.dtype))
        _put(r + head * KEY_DIM, tokens, d, HEADS * KEY_DIM, real, d < KEY_DIM, out)


@triton.jit
def query_backward_kernel(
    query, key, sums, states, written, grad, starts, chunks,
    d_query,  # [T, HEADS, KEY_DIM] out
    d_sums,  # [T, HEADS] out: the part of c's gradient that comes from the output
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens, real = _tokens_of(starts, chunks, chunk, CHUNK)
    at_head = (head // (HEADS // KEY_HEADS)) * KEY_DIM
    queries, keys = query + at_head, key + at_head
    dtype = d_query.dtype.element_ty
    c, _ = _sums_of(sums, tokens, real, head, HEADS)
    before = states + (chunk * HEADS + head) * (KEY_DIM * VALUE_DIM)
    news, grads = written + head * VALUE_DIM, grad + head * VALUE_DIM

    d_m = _pairs(grads, news, tokens, real, HEADS * VALUE_DIM, VALUE_DIM, VALUE_BLOCK)
    d_m *= _decay_between(c, "lower")
    qk = _pairs(queries, keys, tokens, real, KEY_HEADS * KEY_DIM, KEY_DIM, KEY_BLOCK)
    d_c = tl.sum(d_m * qk, 1) - tl.sum(d_m * qk, 0)
    d_m = d_m.to(dtype)
    for at_key in range(0, KEY_DIM, KEY_BLOCK):
        d = at_key + tl.arange(0, KEY_BLOCK)
        total = tl.zeros([CHUNK, KEY_BLOCK], tl.float32)
        for at in range(0, VALUE_DIM, VALUE_BLOCK):
            v = at + tl.arange(0, VALUE_BLOCK)
            g = _tile(grads, tokens, v, HEADS * VALUE_DIM, 1, real, v < VALUE_DIM)
            total += _dot(g, _tile(before, v, d, 1, VALUE_DIM, v < VALUE_DIM, d < KEY_DIM))
        total *= tl.exp(c)[:, None]
        q = _tile(queries, tokens, d, KEY_HEADS * KEY_DIM, 1, real, d < KEY_DIM)
        d_c += tl.sum(total * q, 1)
        k = _tile(keys, tokens, d, KEY_HEADS * KEY_DIM, 1, real, d < KEY_DIM)
        total += _dot(d_m, k)
        _put(d_query + head * KEY_DIM, tokens, d, HEADS * KEY_DIM, real, d < KEY_DIM, total)
    tl.store(d_sums + tokens * HEADS + head, d_c, mask=real)


@triton.jit
def key_backward_kernel(
    query, key, value, beta, sums, u, w, p, r, states, written, d_states, grad, d_sums,
    starts, chunks,
    d_key,  # [T, HEADS, KEY_DIM] out
    d_value,  # [T, HEADS, VALUE_DIM] out
    d_beta,  # [T, HEADS] out
    d_decay,  # [T, HEADS] out
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens, real = _tokens_of(starts, chunks, chunk, CHUNK)
    at_head = (head // (HEADS // KEY_HEADS)) * KEY_DIM
    queries, keys = query + at_head, key + at_head
    dtype = d_key.dtype.element_ty
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    c, final = _sums_of(sums, tokens, real, head, HEADS)
    b = tl.load(beta + tokens * HEADS + head, mask=real, other=0.0).to(tl.float32)
    d_c = tl.load(d_sums + tokens * HEADS + head, mask=real, other=0.0)
    us, ps = u + head * VALUE_DIM, p + head * VALUE_DIM
    ws, rs = w + head * KEY_DIM, r + head * KEY_DIM
    news, grads = written + head * VALUE_DIM, grad + head * VALUE_DIM

    # Gradient of A without beta: its lower triangle, and its transpose for the keys on the other side.
    d_a = -_pairs(ps, us, tokens, real, HEADS * VALUE_DIM, VALUE_DIM, VALUE_BLOCK)
    d_a -= _pairs(rs, ws, tokens, real, HEADS * KEY_DIM, KEY_DIM, KEY_BLOCK)
    kk = _pairs(keys, keys, tokens, real, KEY_HEADS * KEY_DIM, KEY_DIM, KEY_BLOCK)
    d_a = tl.where(column < row, d_a * _decay_between(c, "lower"), 0.0)
    d_b = tl.sum(d_a * kk, 1)
    d_a *= b[:, None]
    d_c += tl.sum(d_a * kk, 1) - tl.sum(d_a * kk, 0)
    other = -_pairs(us, ps, tokens, real, HEADS * VALUE_DIM, VALUE_DIM, VALUE_BLOCK)
    other -= _pairs(ws, rs, tokens, real, HEADS * KEY_DIM, KEY_DIM, KEY_BLOCK)
    other = tl.where(column > row, other * _decay_between(c, "upper") * b[None, :], 0.0)
    both = (d_a + other).to(dtype)

    for at in range(0, VALUE_DIM, VALUE_BLOCK):
        v = at + tl.arange(0, VALUE_BLOCK)
        in_v = v < VALUE_DIM
        x = _tile(ps, tokens, v, HEADS * VALUE_DIM, 1, real, in_v).to(tl.float32)
        y = _tile(value + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, 1, real, in_v)
        d_b += tl.sum(x * y, 1)
        _put(d_value + head * VALUE_DIM, tokens, v, HEADS * VALUE_DIM, real, in_v, x * b[:, None])
    d_m = _pairs(news, grads, tokens, real, HEADS * VALUE_DIM, VALUE_DIM, VALUE_BLOCK)  # transposed
    d_m = (d_m * _decay_between(c, "upper")).to(dtype)

    at_state = (chunk * HEADS + head) * (KEY_DIM * VALUE_DIM)
    d_final = 0.0
    for at_key in range(0, KEY_DIM, KEY_BLOCK):
        d = at_key + tl.arange(0, KEY_BLOCK)
        in_d = d < KEY_DIM
        total = tl.zeros([CHUNK, KEY_BLOCK], tl.float32)
        for at in range(0, VALUE_DIM, VALUE_BLOCK):
            v = at + tl.arange(0, VALUE_BLOCK)
            in_v = v < VALUE_DIM
            new = _tile(news, tokens, v, HEADS * VALUE_DIM, 1, real, in_v)
            d_state = _tile(d_states + at_state, v, d, 1, VALUE_DIM, in_v, in_d)
            state = _tile(states + at_state, v, d, 1, VALUE_DIM, in_v, in_d)
            total += _dot(new, d_state)
            d_final += tl.sum(d_state.to(tl.float32) * state.to(tl.float32)) * tl.exp(final)
        total *= tl.exp(final - c)[:, None]
        k = _tile(keys, tokens, d, KEY_HEADS * KEY_DIM, 1, real, in_d)
        after_chunk = tl.where(real, tl.sum(total * k, 1), 0.0)
        d_c -= after_chunk
        d_final += tl.sum(after_chunk, 0)
        x = _tile(rs, tokens, d, HEADS * KEY_DIM, 1, real, in_d) * tl.exp(c)[:, None]
        read = tl.sum(x * k, 1)
        d_b += read
        d_c += read * b
        total += x * b[:, None] + _dot(both, k)
        q = _tile(queries, tokens, d, KEY_HEADS * KEY_DIM, 1, real, in_d)
        total += _dot(d_m, q)
        _put(d_key + head * KEY_DIM, tokens, d, HEADS * KEY_DIM, real, in_d, total)
    tl.store(d_beta + tokens * HEADS + head, d_b.to(d_beta.dtype.element_ty), mask=real)
    d_c = tl.where(real, d_c, 0.0)
    d_g = tl.cumsum(d_c, 0, reverse=True) + d_final
    tl.store(d_decay + tokens * HEADS + head, d_g, mask=real)
