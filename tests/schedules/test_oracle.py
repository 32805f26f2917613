"""Bubbles and peaks from the papers, and from the generators of PyTorch 2.13 in our simulator.

F = I = W = 1 for the whole share of a rank. The bubble includes fill and drain. Messages are free
unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from penstock import Cost, Timeline, lower, schedules, simulate


def timed(name: str, p: int, m: int, v: int | None = None, **costs: float) -> Timeline:
    schedule = schedules.make(name, p, m, v)
    return simulate(lower(schedule), Cost.even(schedule.placement, **costs))


# schedule, stages a rank: {(ranks, chunks): (bubble in %, peak on the worst rank)}
ORACLE: dict[tuple[str, int], dict[tuple[int, int], tuple[float, float]]] = {
    ("gpipe", 1): {
        (4, 4): (42.9, 4),
        (4, 8): (27.3, 8),
        (8, 8): (46.7, 8),
        (8, 16): (30.4, 16),
        (8, 64): (9.9, 64),
    },
    ("1f1b", 1): {
        (4, 4): (42.9, 4),
        (4, 8): (27.3, 4),
        (8, 8): (46.7, 8),
        (8, 16): (30.4, 8),
        (8, 64): (9.9, 8),
    },
    ("interleaved", 2): {
        (4, 4): (27.3, 4),
        (4, 8): (15.8, 5.5),
        (8, 8): (30.4, 8),
        (8, 16): (17.9, 11.5),
        (8, 64): (5.2, 11.5),
    },
    ("interleaved", 4): {
        (4, 4): (15.8, 4),
        (4, 8): (8.6, 4.75),
        (8, 8): (17.9, 8),
        (8, 16): (9.9, 9.75),
        (8, 64): (2.7, 9.75),
    },
    ("interleaved-zb", 2): {
        (4, 4): (11.1, 4),
        (4, 8): (5.9, 4),
        (8, 8): (12.7, 8),
        (8, 16): (6.8, 8),
        (8, 64): (1.8, 8),
    },
    ("zb-v", 2): {
        (4, 4): (20.0, 4),
        (4, 8): (5.9, 4),
        (8, 8): (22.6, 8),
        (8, 16): (6.8, 8),
        (8, 64): (1.8, 8),
    },
    ("dualpipe-v", 2): {(4, 8): (5.9, 4.5), (8, 16): (6.8, 8.5), (8, 64): (1.8, 8.5)},
}
BEATEN = {("zb-v", 4, 4), ("zb-v", 8, 8)}
CASES = [(*key, *sizes, *figures) for key, row in ORACLE.items() for sizes, figures in row.items()]


@pytest.mark.parametrize(("name", "v", "p", "m", "bubble", "peak"), CASES)
def test_bubble_and_peak_equal_published_figures(
    name: str, v: int, p: int, m: int, bubble: float, peak: float
) -> None:
    timeline = timed(name, p, m, v)
    assert max(timeline.peak) == peak
    if (name, p, m) in BEATEN:
        assert 100 * timeline.bubble < bubble - 5
    else:
        assert 100 * timeline.bubble == pytest.approx(bubble, abs=0.051)


@pytest.mark.parametrize(
    ("name", "v", "bubble"),
    [
        ("gpipe", 1, 10.4),
        ("1f1b", 1, 14.8),
        ("interleaved", 2, 6.6),
        ("interleaved", 4, 5.6),
        ("interleaved-zb", 2, 3.6),
        ("zb-v", 2, 3.4),
        ("dualpipe-v", 2, 3.6),
    ],
)
def test_bubble_when_each_message_takes_a_tenth_of_a_forward(
    name: str, v: int, bubble: float
) -> None:
    assert 100 * timed(name, 8, 64, v, send=0.1).bubble == pytest.approx(bubble, abs=0.051)


SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (p, p + 1, 2 * p, 4 * p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
class TestFormulas:
    def test_gpipe(self, p: int, m: int) -> None:
        timeline = timed("gpipe", p, m)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.peak == (m,) * p

    def test_one_f_one_b(self, p: int, m: int) -> None:
        timeline = timed("1f1b", p, m)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.peak == tuple(p - r for r in range(p))

    def test_eager_hides_messages(self, p: int, m: int) -> None:
        timeline = timed("eager-1f1b", p, m)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.peak == tuple(min(m, 2 * (p - r) - 1) for r in range(p))
        fill_and_drain = 2 * (p - 1) * 0.1
        late = timed("eager-1f1b", p, m, send=0.1)
        assert late.makespan == pytest.approx(timeline.makespan + fill_and_drain)

    @pytest.mark.parametrize("v", [2, 3, 4])
    def test_interleaved(self, p: int, m: int, v: int) -> None:
        m = p * -(-m // p)
        timeline = timed("interleaved", p, m, v)
        assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
        if m >= 2 * p:
            assert max(timeline.peak) == pytest.approx(p * (1 + (p - 1) / (p * v)))

    @pytest.mark.parametrize("v", [2, 3, 4])
    def test_looped_bfs(self, p: int, m: int, v: int) -> None:
        timeline = timed("looped-bfs", p, m, v)
        assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
        assert max(timeline.peak) == pytest.approx(m)

    @pytest.mark.parametrize(("i", "w"), [(1, 1), (1, 0.5), (1.2, 0.8), (1.5, 1)])
    def test_zb_h1(self, p: int, m: int, i: float, w: float) -> None:
        timeline = timed("zb-h1", p, m, I=i, W=w)
        assert timeline.makespan - timeline.busy[0] == pytest.approx((p - 1) * (1 + i - w))
        assert timeline.peak == (p,) * p

    @pytest.mark.parametrize(("i", "w"), [(1, 1), (1, 0.5), (1.2, 0.8), (1.5, 1)])
    def test_zb_h2(self, p: int, m: int, i: float, w: float) -> None:
        m = max(m, 2 * p - 1)
        timeline = timed("zb-h2", p, m, I=i, W=w)
        assert timeline.peak == (2 * p - 1,) * p
        for rank, lane in enumerate(timeline.computes):
            inside = lane[-1].end - lane[0].start - timeline.busy[rank]
            assert inside == pytest.approx((p - 1 - rank) * (1 + i - 2 * w))

    def test_zb_v(self, p: int, m: int) -> None:
        timeline = timed("zb-v", p, m)
        skew = (p - 1) / 2
        assert timeline.makespan == pytest.approx(3 * m + skew)
        assert max(timeline.peak) <= p

    def test_v_half(self, p: int, m: int) -> None:
        timeline = timed("v-half", p, m)
        assert timeline.makespan - 3 * m <= 3 * (p - 1) / 2 + 1e-9
        assert max(timeline.peak) == min(m, (p + 2) // 2)

    def test_v_min(self, p: int, m: int) -> None:
        timeline = timed("v-min", p, m)
        assert timeline.makespan - 3 * m <= 3 * (p - 1) * 2 / 3 + 1e-9
        assert max(timeline.peak) == min(m, (p + 4) // 3)

    def test_dualpipe_v(self, p: int, m: int) -> None:
        m = max(m, 2 * p)
        F, B, W = 0.5, 1.0, 0.5  # seconds of one stage
        timeline = timed("dualpipe-v", p, m)
        assert timeline.makespan - 3 * m <= (p - 1) * (F + B + B - 3 * W) + 1e-9
        assert max(timeline.peak) == p + 0.5


def test_naive_keeps_one_rank_busy() -> None:
    assert timed("naive", 4, 8).bubble == 0.75
