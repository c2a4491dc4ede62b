"""The controller's place in the pool: it hears of every worker, and each worker hears of its share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from rollout.controller import Controller, Host, Pace, Seen
from rollout.host import look

PACE_SECONDS = 0.2  # between two decisions of the controller
_PLACES_EACH = 4  # of a worker, at least, where there are so few
HOST_SECONDS = 1.0  # between two looks at the machine
_MAX_PER_SECOND = 1e6  # as good as no limit, and a number in JSON
Share = dict[str, float]  # what Gate.pace() takes


@dataclass
class Pacer:
    """Workers are named by numbers."""

    controller: Controller
    _pace: Pace | None = None
    _paced_at: float = -inf
    _host: Host = field(default_factory=Host)
    _hosts: dict[int, Host] = field(default_factory=dict)  # by worker, as it last told
    _looked_at: float = -inf
    _told: dict[int, Share] = field(default_factory=dict)

    def words(self, rollouts: int) -> str:
        """Say what is held back while so many run, and why; "" when nothing is."""
        if not self._pace or not self._pace.why:
            return ""
        bound = "on the way down to" if rollouts > self._pace.rollouts else "at most"
        return f"{bound} {self._pace.rollouts}: {self._pace.why}"

    def allows(self, rollouts: int) -> bool:
        """Tell whether one more may run beside so many."""
        return self._pace is None or rollouts < self._pace.rollouts

    def workers(self, most: int) -> int:
        """Return how many workers, of so many, new rollouts should go to.

        Few places are used better by few: what one leaves another takes at once, and each sees more of the limit.
        """
        if not self._pace or not self._pace.is_limit:
            return most
        return max(min(ceil(self._pace.requests / _PLACES_EACH), most), 1)

    def seen(self, worker: int, seen: Seen) -> None:
        """Take a worker's report."""
        self.controller.seen(worker, seen, time.monotonic())
        if seen.refused:
            self._paced_at = -inf  # what is on its way must not be refused as well

    def told(self, worker: int, host: Host) -> None:
        """Take what a worker says of the machine it runs on."""
        self._hosts[worker] = host

    def spoke(self, worker: int) -> None:
        """Tell a worker everything again: from now on it is known by which clock it takes it."""
        self._told.pop(worker, None)
        self._paced_at = -inf

    def gone(self, worker: int) -> None:
        """Forget a worker."""
        self.controller.gone(worker)
        self._hosts.pop(worker, None)
        self._told.pop(worker, None)

    def news(self, rollouts: Mapping[int, int]) -> dict[int, Share]:
        """Decide when it is time, given how many rollouts each worker has; return the shares that have changed."""
        now = time.monotonic()
        if now - self._paced_at < PACE_SECONDS:
            return {}
        self._paced_at = now
        if now - self._looked_at >= HOST_SECONDS:
            hosts = [look(), *self._hosts.values()]  # the one that is worst off counts
            self._host = Host(min(host.free_memory for host in hosts), max(host.load for host in hosts))
            self._looked_at = now
        running = sum(rollouts.values())
        pace = self._pace = self.controller.decide(running, self._host, now)
        busy = {worker: count for worker, count in rollouts.items() if count}
        places = round(pace.requests)
        targets = self._targets(places, busy)
        given = targets if places >= running else self._within(places, targets)
        senders = targets if 0 < places < len(busy) else busy  # where some have no place, the rate is the others' alone
        shares = {
            worker: {
                "requests": given[worker],
                "per_second": min(pace.per_second * senders[worker] / sum(senders.values()), _MAX_PER_SECOND)
                if senders[worker]
                else 0.0,
                "not_before": max(pace.not_before, 0.0),
            }
            for worker in busy
        }
        changed = {worker: share for worker, share in shares.items() if self._told.get(worker) != share}
        self._told |= changed
        return changed

    def _targets(self, places: int, busy: Mapping[int, int]) -> dict[int, int]:
        """Divide places by rollouts. Where not every worker can have one, those with few rollouts end them first."""
        if places >= len(busy):
            return dict(zip(busy, divided(places, list(busy.values())), strict=True))
        asking = [worker for worker in busy if self.controller.wanted(worker)] or list(busy)
        asking.sort(key=lambda worker: (busy[worker], not self._places(worker)))
        return {worker: int(worker in asking[:places]) for worker in busy}

    def _within(self, places: int, targets: Mapping[int, int]) -> dict[int, int]:
        """Give nobody a place that another one's open requests still take."""
        given = {worker: min(self._places(worker), target) for worker, target in targets.items()}
        taken = {worker: max(count, self._taken(worker)) for worker, count in given.items()}
        room = max(places - sum(taken.values()), 0)
        for worker in sorted(targets, key=lambda worker: given[worker] - targets[worker]):
            more = min(targets[worker] - given[worker], room)
            given[worker] += more
            room -= max(given[worker] - taken[worker], 0)
        return given

    def _places(self, worker: int) -> int:
        """Return how many places a worker was told of last."""
        return int(self._told.get(worker, {}).get("requests", 0))

    def _taken(self, worker: int) -> int:
        """Return how many requests a worker has open, or may have by now."""
        return max(self.controller.open(worker), min(self._places(worker), self.controller.wanted(worker)))


def divided(places: int, wanted: Sequence[int]) -> list[int]:
    """Divide places in proportion to what is wanted; where there is enough, everybody gets at least that."""
    total = sum(wanted)
    if places >= total:
        return [ceil(places * want / total) for want in wanted]
    exact = [places * want / total for want in wanted]
    given = [int(share) for share in exact]
    most_left = sorted(range(len(wanted)), key=lambda number: given[number] - exact[number])
    for number in most_left[: places - sum(given)]:
        given[number] += 1
    return given
