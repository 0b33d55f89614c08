"""Memory of large outputs is used again, and never while an array over it is alive."""

from __future__ import annotations

import threading

import numpy as np

from onnxc.runtime.outputs import KEPT, KEPT_BYTES, LARGE, OutputPool, has_large, wanted

SPEC = ((LARGE // 4, 2), np.dtype(np.float32))


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_comes_back_when_the_array_is_gone() -> None:
    pool = OutputPool()
    (first,) = pool.arrays(wanted([SPEC]))
    where = address(first)
    del first
    assert address(pool.arrays(wanted([SPEC]))[0]) == where


def test_memory_in_use_is_left_alone_even_by_a_view() -> None:
    pool = OutputPool()
    (first,) = pool.arrays(wanted([SPEC]))
    first[:] = 7
    part = first[10:20, 1:]
    del first
    for _ in range(5):
        (other,) = pool.arrays(wanted([SPEC]))
        other[:] = 1
    assert (part == 7).all()


def test_sizes_that_change_from_call_to_call_are_forgotten() -> None:
    pool = OutputPool()
    for rows in range(1, 400):
        arrays = pool.arrays(wanted([((LARGE, rows), np.dtype(np.uint8)), ((LARGE, rows + 1), np.dtype(np.uint8))]))
    del arrays
    held = sum(size * len(blocks) for size, blocks in pool._blocks.items())
    assert held <= max(KEPT_BYTES, KEPT * LARGE * 2 * 400)


def test_sizes_that_alternate_are_kept() -> None:
    pool = OutputPool()
    few, many = [((LARGE, 3), np.dtype(np.uint8))], [((LARGE, 1000), np.dtype(np.uint8))]
    places = [[address(pool.arrays(wanted(specs))[0]) for specs in (few, many)] for _ in range(4)]
    assert places[1:] == places[:1] * 3


def test_shapes_dtypes_and_empty_outputs() -> None:
    pool = OutputPool(poison=True)
    specs = [SPEC, ((), np.dtype(np.int64)), ((0, 3), np.dtype(np.float32)), ((5,), np.dtype(bool))]
    arrays = pool.arrays(wanted(specs))
    assert [(a.shape, a.dtype) for a in arrays] == specs
    assert all(a.flags.c_contiguous and a.flags.writeable for a in arrays)
    assert np.isnan(arrays[0]).all()
    assert has_large(wanted(specs))
    assert not has_large(wanted(specs[1:]))


def test_threads_never_share_a_block() -> None:
    pool = OutputPool()
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            a, b = pool.arrays(wanted([SPEC, SPEC]))
            a.fill(number)
            b.fill(-number)
            if not ((a == number).all() and (b == -number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(k + 1,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_memory_used_last_comes_first() -> None:
    """Caches may still hold it."""
    pool = OutputPool()
    (first,), (second,) = pool.arrays(wanted([SPEC])), pool.arrays(wanted([SPEC]))
    where = address(second)
    del first, second
    assert [address(pool.arrays(wanted([SPEC]))[0]) for _ in range(3)] == [where] * 3
