"""``python -m tests.chaos``: a queue under load while everything is killed. See ``--help``.

Needs Linux. Starts its own database servers. Exits with 1 if a job is lost or ran again without a
reason, if a promise of keys, limits, pipelines, batches or schedules is broken, if work stalls, or
if transactions deadlock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from ..proxy import in_front_of
from .servers import SERVERS

# Alternating phases, in seconds: in the calm one, all work must continue.
HARM, CALM = 12.0, 12.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--database", choices=[*SERVERS, "both"], default="both")
    parser.add_argument(
        "--seconds", type=float, default=180, help="Duration of the faults on each database."
    )
    parser.add_argument("--rate", type=float, default=40, help="Jobs per second.")
    parser.add_argument(
        "--dead-after",
        type=float,
        default=30,
        help="The option; the heartbeat interval is a sixth of it.",
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    if given.database == "both":
        # In separate processes: a process has one DATABASE_URL.
        commands = [
            [sys.executable, "-m", "tests.chaos", *sys.argv[1:], "--database", each]
            for each in SERVERS
        ]
        return max(os.spawnv(os.P_WAIT, sys.executable, command) for command in commands)
    return run(given)


def run(given: argparse.Namespace) -> int:
    print(f"Chaos on {given.database} for {given.seconds:g} s (--seed {given.seed})", flush=True)
    random.seed(given.seed)
    server = SERVERS[given.database]()
    line, cut_url = in_front_of(server.url)
    beat = {
        "beat_interval": given.dead_after / 6,
        "dead_after": given.dead_after,
        "timeout_grace": 1,
    }
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DBQUEUE_OPTIONS": json.dumps({**beat, "task_modules": ["tests.chaos.tasks"]}),
        # Hundreds of jobs are killed; their tracebacks are of no use.
        "PYTHONWARNINGS": "ignore",
    }
    os.environ |= {**env, "DATABASE_URL": server.url}
    import django

    django.setup()
    from django.core.management import call_command

    from .hosts import Host, ServiceManager
    from .load import Load
    from .monkey import Monkey
    from .operators import LockHolder, Operators
    from .report import report
    from .watch import Watch

    call_command("migrate", run_syncdb=True, verbosity=0)
    folder = Path(tempfile.mkdtemp(prefix="dbqueue-chaos-log-"))
    hosts = [
        Host("a", server.url, None, env, folder / "a.log"),
        Host("b", cut_url, line, env, folder / "b.log"),
    ]
    monkey, load = Monkey(hosts, server, given.dead_after), Load(given.rate)
    watch, operators, lock_holder = Watch(given.dead_after), Operators(), LockHolder()
    service_manager = ServiceManager(hosts)
    try:
        for thread in (load, operators, lock_holder, watch, service_manager):
            thread.start()
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < given.seconds:
            time.sleep(random.uniform(0.5, 2.5))
            # Without live processes, as on a busy machine, more faults would test nothing.
            if watch.alive and elapsed % (HARM + CALM) < HARM:
                monkey.act()
        for thread in (load, operators, lock_holder):
            thread.stop()
        monkey.recover()
        all_finished = load.wait(given.dead_after * 2 + 120)
        watch.stop()
        service_manager.stop()
        codes = [host.close() for host in hosts]
        found = report(load, operators, watch, monkey.killed_at, server.deadlocks())
    finally:
        for host in hosts:
            host.power_off()
        server.close()
        line.close()
    done = monkey.done + operators.done + lock_holder.done
    print(
        "\n".join(
            [
                "",
                *(f"{number:4} × {name}" for name, number in sorted(done.items())),
                "",
                *found.lines(),
            ]
        )
    )
    print(f"exit codes at the end      {codes}\nlogs                       {folder}\n", flush=True)
    return 0 if found.is_clean and all_finished and codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
