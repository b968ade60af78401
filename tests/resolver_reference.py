"""The resolve in plain Python: dicts and lists, one entry at a time. Shares no code with hisparse.

Per request: `slots[s]` is None or a dict(position, step, hit). Slots used by the rows of the
current wave may not be taken.
"""

from __future__ import annotations


class ReferenceResolver:
    def __init__(self, page_size, hot_rows, top_k):
        self.page_size = page_size
        self.hot_rows = hot_rows
        self.wave_rows = max(1, hot_rows // top_k)
        self.requests = {}
        self.resident_pages = {}  # (row, page) -> block
        self.host_pages = {}  # (row, page) -> host page
        self.hot_blocks = {}  # row -> list of blocks
        self.hits = self.misses = self.resident = 0
        self.host_reads = []
        self.plan = []  # for each row of the last call: (host row, pool row) of each miss

    def slots_of(self, row):
        return self.requests.setdefault(row, [None] * self.hot_rows)

    def reset(self, row):
        self.requests.pop(row, None)

    def forget_page(self, row, page):
        slots = self.slots_of(row)
        for s, slot in enumerate(slots):
            if slot and slot["position"] // self.page_size == page:
                slots[s] = None

    def locate(self, row, slot):
        return self.hot_blocks[row][slot // self.page_size] * self.page_size + (
            slot % self.page_size
        )

    def state_of(self, row):
        """Of a request: (position in each slot or -1, slots in the order of replacement, slot of
        each position that has one)."""
        slots = self.slots_of(row)
        used = [(1, 2 * s["step"] + s["hit"], i) if s else (0, 0, i) for i, s in enumerate(slots)]
        held = [s["position"] if s else -1 for s in slots]
        kept = {position: i for i, position in enumerate(held) if position >= 0}
        return held, [i for _, _, i in sorted(used)], kept

    def resolve(self, rows, top_k, step):
        """Physical row of each entry, None for padding."""
        seen_rows, used_in_wave, answers, self.plan = {}, {}, [], []
        for row, selection in zip(rows, top_k, strict=True):
            ordinal = seen_rows.get(row, 0)
            seen_rows[row] = ordinal + 1
            if ordinal % self.wave_rows == 0:
                used_in_wave[row] = set()
            answers.append(self.resolve_row(row, selection, step, used_in_wave[row]))
        return answers

    def resolve_row(self, row, selection, step, used):
        where, missed = {}, []
        slots = self.slots_of(row)
        held = {slot["position"]: s for s, slot in enumerate(slots) if slot}
        for position in selection:
            page, offset = divmod(position, self.page_size)
            if position < 0 or position in where:
                continue
            block = self.resident_pages.get((row, page), 0)
            if block:
                self.resident += 1
                where[position] = block * self.page_size + offset
            elif position in held:
                self.hits += 1
                slots[held[position]].update(step=step, hit=True)
                used.add(held[position])
                where[position] = self.locate(row, held[position])
            else:
                where[position] = None
                missed.append(position)
        order = sorted(
            (s for s in range(self.hot_rows) if s not in used),
            key=lambda s: (
                (0, 0, 0, s) if slots[s] is None else (1, slots[s]["step"], int(slots[s]["hit"]), s)
            ),
        )
        self.plan.append([])
        for position, victim in zip(missed, order, strict=False):
            self.misses += 1
            page, offset = divmod(position, self.page_size)
            source = self.host_pages[row, page] * self.page_size + offset
            self.plan[-1].append((source, self.locate(row, victim)))
            slots[victim] = {"position": position, "step": step, "hit": False}
            used.add(victim)
            where[position] = self.locate(row, victim)
            self.host_reads.append((row, position))
        return [where.get(position) for position in selection]
