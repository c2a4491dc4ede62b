"""How near the program comes, with no flag set, to what an endpoint allows that tells nobody what that is.

    python -m tests.bench.bench_limits [--seconds=60] [--workers=2]

For each limit: the share of what was possible that was used, from the first request to the last, growing from a modest
start included; and the share of requests that were refused. The endpoint takes about a second for an answer.
"""

from __future__ import annotations

import argparse

from tests.bench.bench_rollouts import OURS, measured, serving

REQUESTS_PER_ROLLOUT = 2
LIMITS = {  # and the requests a second that it allows
    "at_once:40": 40.0,
    "at_once:150": 150.0,
    "at_once:60;20:15": 30.0,
    "at_once:15;20:60": 45.0,
    "a_second:50": 50.0,
    "a_second:20;20:60": 46.7,
    "in_any_second:20": 20.0,
    "tokens_a_minute:1800000": 29.4,
}
DELAY = "spread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="that a run is meant to take")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limits", nargs="*", default=list(LIMITS))
    options = parser.parse_args()
    print(f"{'limit':<26} {'reached':>8} {'refused':>8} {'seconds':>8}")
    for limit in options.limits:
        rollouts = int(LIMITS[limit] * options.seconds / REQUESTS_PER_ROLLOUT)
        with serving(DELAY, limit) as endpoint:
            measured(f"{OURS} --num_workers={options.workers}", endpoint.base_url, rollouts, 0)
        served = endpoint.served
        print(
            f"{limit:<26} {served.reached:>8.1%} {served.refused:>8.1%} {served.last - served.first:>8.1f}", flush=True
        )


if __name__ == "__main__":
    main()
