"""Repeated observation of tensor values, for signatures whose times or results depend on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from opgrip.capture.program.capture_choices import VALUE_SHARE
from opgrip.capture.signatures.predictions import LEARNT, NEVER, SIGHTINGS
from opgrip.platform import perf_counter_ns

if TYPE_CHECKING:
    from opgrip.capture.recording.thread_mode import ThreadMode

# minimum ratio, and minimum difference in ns, of the times of two call sites that count as different
DIFFERENT, LEAST_NS = 1.5, 20_000
MOST_SITES = 48  # maximum number of scopes, and of storages of the first tensor, that are kept per signature
# numbers of call sites that are kept if there are too many: fastest, slowest with several calls, and slowest with a
# single call; more of the last kind are kept, because some of them were only interrupted
FASTEST, SLOWEST, SLOWEST_ONCE = 4, 6, 12
# number of calls of a signature after which a call site with a single call is not expected to recur
MOST_CALLS_BETWEEN = 2048
MOST_SIGNATURES = 10_000
MOST_LOOKS = 4  # maximum number of call sites to observe per signature

# call site: number of its scope, and number of the first tensor's storage; `ANY` if that memory is not used again
SiteKey = tuple[int, int]
ANY = -1
Key = TypeVar("Key", bound=Hashable)


class _Table(Generic[Key]):
    # Shortest duration of a signature's calls at each call site, and for a call site that occurred once, the index of
    # that call. If there are many, the fastest and slowest are kept: the first or the last call sites would miss some.
    # Entries are integers: Python's garbage collector would traverse all of the program's objects for objects here.

    __slots__ = ("_dull_from_ns", "_dull_to_ns", "_dull_until", "first", "least_ns")

    def __init__(self) -> None:
        self.least_ns: dict[Key, int] = {}
        self.first: dict[Key, int] = {}
        self._forget_dull()

    def add(self, site: Key, duration_ns: int, call: int) -> bool:
        least_ns = self.least_ns.get(site)
        if least_ns is None:
            if self._dull_from_ns <= duration_ns <= self._dull_to_ns and call < self._dull_until:
                return False
            is_full = len(self.least_ns) >= MOST_SITES
            if is_full:
                self._thin_out(call)
            self.least_ns[site], self.first[site] = duration_ns, call
            return is_full
        if site in self.first:
            # a call site that recurs makes space for others with a single call
            del self.first[site]
            self._forget_dull()
        elif duration_ns >= least_ns:
            return False
        self.least_ns[site] = min(least_ns, duration_ns)
        return True

    def recurring_ns(self) -> dict[Key, int]:
        return {site: time for site, time in self.least_ns.items() if site not in self.first}

    def _thin_out(self, call: int) -> None:
        least_ns, first, oldest = self.least_ns, self.first, call - MOST_CALLS_BETWEEN
        ranked = sorted(least_ns, key=least_ns.__getitem__)
        again = [site for site in ranked if site not in first]
        once = [site for site in ranked if first.get(site, oldest) > oldest]
        self.least_ns = {site: least_ns[site] for site in _extremes(again, SLOWEST) + _extremes(once, SLOWEST_ONCE)}
        self.first = {site: first[site] for site in self.least_ns if site in first}
        if len(once) > FASTEST + SLOWEST_ONCE:
            # Until then, ignore durations between the extremes. They would be removed the next time, and sorting for
            # each of them costs more than everything else here.
            self._dull_from_ns, self._dull_to_ns = least_ns[once[FASTEST - 1]], least_ns[once[-SLOWEST_ONCE]]
            self._dull_until = call + MOST_CALLS_BETWEEN

    def _forget_dull(self) -> None:
        self._dull_from_ns = self._dull_to_ns = self._dull_until = -1


def _extremes(ranked: list[Key], slowest: int) -> list[Key]:
    return ranked if len(ranked) <= FASTEST + slowest else [*ranked[:FASTEST], *ranked[-slowest:]]


class _CallSites:
    __slots__ = ("_by_memory", "_by_scope", "_calls", "requested")

    def __init__(self) -> None:
        self._by_scope: _Table[int] = _Table()
        self._by_memory: _Table[SiteKey] = _Table()
        self._calls = 0
        self.requested: set[SiteKey] = set()

    def __len__(self) -> int:
        return len(self._by_scope.least_ns) + len(self._by_memory.least_ns)

    def add(self, site: SiteKey, duration_ns: int) -> bool:
        self._calls = call = self._calls + 1
        has_changed = self._by_scope.add(site[0], duration_ns, call)
        return self._by_memory.add(site, duration_ns, call) or has_changed

    def different(self) -> Iterator[SiteKey]:
        by_scope, by_memory = self._by_scope.recurring_ns(), self._by_memory.recurring_ns()
        # a quick check, which most signatures fail
        if not _differ([*by_scope.values(), *by_memory.values()]):
            return
        # a scope whose memory recurs is represented by its memory
        with_memory = {scope for scope, _ in by_memory}
        scopes = {(scope, ANY): time for scope, time in by_scope.items() if scope not in with_memory}
        times = sorted((time, site) for sites in (scopes, by_memory) for site, time in sites.items())
        if not _differ([time for time, _ in times]):
            return
        last = 0
        for time, site in times:
            if time < last * DIFFERENT or len(self.requested) >= MOST_LOOKS:
                continue
            last = time
            if site not in self.requested:
                self.requested.add(site)
                yield site


def _differ(times_ns: Sequence[int]) -> bool:
    least_ns, most_ns = min(times_ns, default=0), max(times_ns, default=0)
    return most_ns >= max(least_ns * DIFFERENT, least_ns + LEAST_NS)


class SiteTimes:
    def __init__(self) -> None:
        self._by_signature: dict[int, _CallSites] = {}
        self._complete: set[int] = set()

    def note(
        self,
        signatures: NDArray[np.int64],
        scopes: NDArray[np.int64],
        memory: NDArray[np.int64],
        durations_ns: NDArray[np.int64],
    ) -> Iterator[tuple[int, SiteKey]]:
        # most operators of a program are too short for differences to matter
        long = set(signatures[durations_ns >= LEAST_NS].tolist()) - self._complete
        if not long:
            return
        is_long = np.isin(signatures, list(long))
        columns = [column[is_long].tolist() for column in (signatures, scopes, memory, durations_ns)]
        by_signature, changed = self._by_signature, set[int]()
        for number, scope, where, duration_ns in zip(*columns, strict=True):
            sites = by_signature.get(number)
            if sites is None:
                if len(by_signature) >= MOST_SIGNATURES:
                    continue
                sites = by_signature[number] = _CallSites()
            if sites.add((scope, where), duration_ns):
                changed.add(number)
        for number in sorted(changed):
            sites = by_signature[number]
            for site in sites.different():
                yield number, site
            if len(sites.requested) >= MOST_LOOKS:
                self._complete.add(number)


# which calls of a signature to observe: the 2nd, 4th and 8th that is looked up by key and not predicted
EARLY = frozenset({2, 4, 8})
# number of a signature's calls after which one is observed again; for each further observation, four times as many
LATE = 32
MOST_TRIES = 1000  # number of calls of a signature that are compared with the requested call sites before giving up
MOST = 8  # maximum number of observations of one signature after its first call
# time in ns that observations may take in addition to their share, so that short programs are observed too
ALLOWANCE_NS = 20_000_000


class Look(Enum):
    NO = auto()
    VALUES = auto()
    SITE = auto()


class Observations:
    """Decides when the tensor values in later calls of a signature are recorded again ("observed").

    share : maximum share of the program's time for observations
    """

    def __init__(self, share: float = VALUE_SHARE) -> None:
        self._share = share
        self._key_lookups: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._next: dict[int, int] = {}
        self._looks: Counter[int] = Counter()
        self._due: set[int] = set()
        self._sites: dict[int, set[SiteKey]] = {}
        self._tries: Counter[int] = Counter()
        self._learning = False
        self._early = EARLY
        self._own_ns = self._aside_ns = self.spent_ns = 0
        self._began_ns = perf_counter_ns()
        self._idle_since_ns: int | None = None

    def set_idle(self, idle: bool) -> None:
        """Begin or end a period in which no calls are recorded; its time does not count as the program's time."""
        now = perf_counter_ns()
        if idle and self._idle_since_ns is None:
            self._idle_since_ns = now
        elif not idle and self._idle_since_ns is not None:
            self._began_ns += now - self._idle_since_ns
            self._idle_since_ns = None

    def set_learning(self, learning: bool) -> None:
        """Begin or end the warm-up steps, in which the capture examines calls and records none."""
        self._learning = learning
        # the time spent on learning must not reduce the time for observations in later steps
        self._own_ns = self._aside_ns = 0
        self._began_ns = perf_counter_ns()
        self._early = frozenset({2}) if learning else frozenset()
        if not learning:
            self._due.clear()

    def forget(self) -> None:
        for table in (self._key_lookups, self._calls, self._next, self._looks, self._sites, self._tries):
            table.clear()
        self._due.clear()

    def want(self, number: int) -> None:
        if number not in self._next:
            self._key_lookups[number] = 1
            self._next[number] = LATE

    def sightings(self, number: int) -> int:
        if number in self._next and self._key_lookups[number] + 1 < max(self._early, default=0):
            return NEVER
        return LEARNT if self._learning else SIGHTINGS

    def is_due(self, number: int) -> bool:
        """Return True if the tensor values of the current call of signature `number` should be observed."""
        if number in self._next:
            self._key_lookups[number] += 1
            if self._key_lookups[number] in self._early and self._looks[number] < MOST:
                self._due.add(number)
        return number in self._due or self.waits(number)

    def want_at(self, number: int, site: SiteKey, modes: Sequence[ThreadMode]) -> None:
        self._sites.setdefault(number, set()).add(site)
        for mode in modes:
            mode.schedule_observation(number)

    def waits(self, number: int) -> bool:
        return number in self._sites

    def take(self, number: int, here: Callable[[], SiteKey]) -> Look:
        if number in self._due and self.is_affordable():
            self._due.discard(number)
            self._looks[number] += 1
            return Look.VALUES
        # calls of learning steps are not in the trace, so their call sites are not either
        if number in self._sites and not self._learning and self.is_affordable():
            return self._take_at(number, here())
        return Look.NO

    def _take_at(self, number: int, here: SiteKey) -> Look:
        sites = self._sites[number]
        matching_site = next((site for site in (here, (here[0], ANY)) if site in sites), None)
        self._tries[number] += 1
        if matching_site is not None:
            sites.discard(matching_site)
        if not sites or self._tries[number] >= MOST_TRIES:
            del self._sites[number]
        return Look.NO if matching_site is None else Look.SITE

    def spend(self, own_ns: int) -> None:
        self._own_ns += own_ns
        self.spent_ns += own_ns

    def set_aside(self, own_ns: int) -> None:
        """Subtract the time of the capture's own work from the program's time."""
        self._aside_ns += own_ns
        self.spent_ns += own_ns

    def is_affordable(self) -> bool:
        if self._learning:
            return True
        program_ns = perf_counter_ns() - self._began_ns - self._own_ns - self._aside_ns
        return self._own_ns <= ALLOWANCE_NS + self._share * program_ns

    def count(self, signatures: Sequence[int], modes: Sequence[ThreadMode]) -> None:
        counts = Counter(filter(self._next.__contains__, signatures))
        for number, count in counts.items():
            self._calls[number] += count
            if self._calls[number] >= self._next[number] and self._looks[number] < MOST:
                self._next[number] = 4 * self._calls[number]
                self._due.add(number)
                for mode in modes:
                    mode.schedule_observation(number)
