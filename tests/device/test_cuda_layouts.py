"""What the cuda backend works out on the host, in numpy: waves, and a command's table changes."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_sources import nvcc

from hisparse.device.cuda import movers, tables
from hisparse.device.cuda.kernels import source
from hisparse.device.cuda.tables import pack_changes
from hisparse.device.cuda.waves import lay_out, most_lines
from hisparse.fsm.wire import SparseKVOffloadCommand, Table, TableUpdate

BACKED = np.array([True, True, False, True])


def rows_of(*counts):
    """A step with so many tokens of request 0, 1, ..."""
    return np.repeat(np.arange(len(counts)), counts).astype(np.int32)


def test_a_step_whose_rows_fit_is_one_wave_of_all_requests():
    looked_up, (wave,) = lay_out(rows_of(2, 1, 2), BACKED, 2)
    assert looked_up.tolist() == [] and wave.span == 2
    assert wave.rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert wave.tokens.tolist() == [0, 1, 2, -1, 3, 4]


def test_beyond_a_wave_only_requests_with_a_hot_region_take_turns():
    looked_up, waves = lay_out(rows_of(3, 0, 4, 1), BACKED, 2)
    assert looked_up.tolist() == [3, 4, 5, 6]
    assert [wave.tokens.tolist() for wave in waves] == [[0, 1, 7, -1], [2]]
    assert [wave.span for wave in waves] == [2, 1]


def test_padding_takes_no_line():
    looked_up, waves = lay_out(np.array([-1, 3, -1], np.int32), BACKED, 2)
    assert looked_up.tolist() == [0, 2] and waves[0].tokens.tolist() == [1]
    looked_up, waves = lay_out(np.full(3, -1, np.int32), BACKED, 2)
    assert looked_up.tolist() == [0, 1, 2] and waves == ()


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 5)), max_size=8),
    st.integers(1, 4),
)
def test_every_token_has_one_place_and_order_is_kept(spans, width):
    rows = np.repeat([row for row, _ in spans], [n for _, n in spans]).astype(np.int32)
    looked_up, waves = lay_out(rows, BACKED, width)
    placed = [wave.tokens[wave.tokens >= 0] for wave in waves]
    assert sorted([*looked_up, *(t for tokens in placed for t in tokens)]) == [*range(len(rows))]
    seen = dict.fromkeys(range(4), -1)
    for wave in waves:
        assert len(wave.rows) % wave.span == 0 and wave.span <= width
        for row in set(wave.rows.tolist()) - {-1}:
            mine = wave.tokens[wave.rows == row]
            assert len(mine) == wave.span
            tokens = mine[mine >= 0].tolist()
            assert (rows[tokens] == row).all() and tokens == sorted(tokens)
            assert tokens[0] > seen[row]
            seen[row] = tokens[-1]
    real, requests = int((rows >= 0).sum()), len({*rows.tolist()} - {-1})
    assert not waves or sum(len(w.rows) for w in waves) <= most_lines(real, requests, width)


@pytest.mark.parametrize(
    ("rows", "requests", "width", "wanted"),
    [(8, 1, 2, 8), (8, 3, 2, 10), (8, 8, 1, 8), (8, 100, 4, 20), (8, 8, 100, 20), (1, 9, 4, 1)],
)
def test_the_most_lines_that_a_step_takes_are_of_one_deep_request_beside_others(
    rows, requests, width, wanted
):
    assert most_lines(rows, requests, width) == wanted
    steps = [rows_of(rows - n, *[1] * n) for n in range(min(rows, requests))]
    made = [lay_out(step, np.ones(rows, bool), width)[1] for step in steps]
    assert max(sum(len(wave.rows) for wave in waves) for waves in made) == wanted


# -- table changes --------------------------------------------------------------------------------


def command(tables=(), resets=()):
    return SparseKVOffloadCommand(1, 1, 0, 1, tables=tuple(tables), resets=tuple(resets))


def test_changes_come_by_row_with_the_rows_that_are_only_reset():
    packed = pack_changes(
        command(
            [
                TableUpdate(Table.RESIDENT, 5, 2, (7, 8)),
                TableUpdate(Table.HOT, 1, 0, (9,)),
                TableUpdate(Table.RESIDENT, 5, 0, ()),
            ],
            resets=[3, 5],
        )
    )
    assert packed.rows.tolist() == [1, 3, 5] and packed.resets.tolist() == [0, 1, 1]
    assert packed.starts.tolist() == [0, 1, 1, 3]
    assert packed.changes.tolist() == [[3, 0, 9, 9], [0, 2, 7, 7], [0, 3, 8, 8]]


def test_a_command_without_changes_packs_nothing():
    packed = pack_changes(command())
    assert packed.packed().tolist() == [0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Table)),
            st.integers(0, 2),
            st.integers(0, 3),
            st.lists(st.integers(0, 2), max_size=3),
        ),
        max_size=10,
    ),
    st.sets(st.integers(0, 2)),
    st.integers(0, 2),
)
def test_packed_changes_do_what_one_after_the_other_does(updates, resets, before):
    """Entries at the end, and which of them named another id on the way there."""
    state = {(t, r, e): before for t in Table for r in range(3) for e in range(8)}
    gone = set()
    for key in state:
        if key[1] in resets:
            state[key] = 0
    for table, row, entry, ids in updates:
        for i, new in enumerate(ids):
            key = (table, row, entry + i)
            if state[key] not in (0, new):
                gone.add(key)
            state[key] = new
    packed = pack_changes(
        command([TableUpdate(t, r, e, tuple(ids)) for t, r, e, ids in updates], resets)
    )
    found, lost = {}, set()
    for i, row in enumerate(packed.rows.tolist()):
        for table, entry, first, last in packed.changes[packed.starts[i] : packed.starts[i + 1]]:
            key = (tables._TABLES[table & 255], row, int(entry))
            assert key not in found, "one change an entry"
            found[key] = int(last)
            old = 0 if packed.resets[i] else before
            if table > 255 or old not in (0, first):
                lost.add(key)
    assert all(found.get(key, 0 if key[1] in resets else before) == state[key] for key in state)
    assert lost == gone


STRUCTS = {
    "tables.cu": [("Begin", tables._BEGIN)],
    "rows.cu": [
        ("View", movers._VIEW),
        ("TableOf", movers._TABLE),
        ("Checks", movers._CHECKS),
    ],
}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_laid_out_as_the_kernels_read_them(name, tmp_path):
    checks = [
        f'static_assert(sizeof({struct}) == {dtype.itemsize}, "size");\n'
        + "".join(
            f'static_assert(__builtin_offsetof({struct}, {name}) == {field[1]}, "{name}");\n'
            for name, field in dtype.fields.items()
        )
        for struct, dtype in STRUCTS[name]
    ]
    probe = tmp_path / "probe.cu"
    probe.write_text(source(name) + "".join(checks))
    made = subprocess.run(
        [nvcc(), "-std=c++17", "-arch=sm_90", "-cubin", str(probe), "-o", str(tmp_path / "o")],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
