import math

from hypothesis import given
from hypothesis import strategies as st

from amp_track.frontier import Edge, Limit, Probe, explore
from amp_track.job import Verdict


def search(truth: int, limit: Limit, failure: Verdict = Verdict.OOM) -> tuple[Edge, list[Probe]]:
    """Probe a device on which exactly the batches up to `truth` fit."""
    probes: list[Probe] = []
    while not isinstance(step := explore(probes, limit), Edge):
        assert step not in {probe.batch_size for probe in probes}, "no batch is probed twice"
        assert 1 <= step <= limit.batch_size
        probes.append(Probe(step, Verdict.FITS if step <= truth else failure))
    return step, probes


@given(truth=st.integers(0, 10**6), limit=st.integers(1, 10**6))
def test_edge_is_exact_and_proven(truth: int, limit: int) -> None:
    edge, probes = search(truth, Limit(limit, "dataset"))
    assert edge.largest_batch == min(truth, limit)
    tried = {probe.batch_size: probe.fits for probe in probes}
    if edge.largest_batch:
        assert tried[edge.largest_batch]
    if truth < limit:
        assert edge == Edge(truth, truth + 1, "memory")
        assert not tried[truth + 1]
    else:
        assert edge == Edge(limit, None, "dataset")
    assert len(probes) <= 2 * math.log2(edge.largest_batch + 1) + 2


def test_a_kernel_limit_is_named() -> None:
    edge, _ = search(100, Limit(1000, "dataset"), failure=Verdict.KERNEL_LIMIT)
    assert edge.bound == "kernel"


def test_a_batch_that_ran_and_failed_counts_as_failed() -> None:
    probes = [Probe(4, Verdict.FITS), Probe(5, Verdict.FITS), Probe(5, Verdict.OOM)]
    assert explore(probes, Limit(100, "dataset")) == Edge(4, 5, "memory")


@given(st.permutations([Probe(b, Verdict.FITS if b <= 20 else Verdict.OOM) for b in (1, 2, 4, 8, 16, 20, 21, 32)]))
def test_the_order_of_probes_does_not_matter(probes: list[Probe]) -> None:
    assert explore(probes, Limit(100, "dataset")) == Edge(20, 21, "memory")
