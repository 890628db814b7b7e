"""Times of schedules: cron expressions, time zones, and daylight saving time (DST)."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from itertools import islice, pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from django_dbqueue.exceptions import InvalidSchedule
from django_dbqueue.recurrence.cron import Cron, Every, last_times, shortest_gap

UTC = timezone.utc
# Both hemispheres, a two-hour change, a one-month change, winter as the exception, no change.
ZONES = [
    "America/New_York",
    "America/St_Johns",
    "America/Santiago",
    "Europe/Berlin",
    "Europe/Dublin",
    "Africa/Casablanca",
    "Africa/Cairo",
    "Pacific/Chatham",
    "Antarctica/Troll",
    "Asia/Kathmandu",
]
# A leap year, and the next change to daylight saving time.
START, END = datetime(2024, 1, 1, tzinfo=UTC), datetime(2025, 5, 1, tzinfo=UTC)


def times(expression: str, zone: str, after: str, number: int = 5) -> list[str]:
    moment = datetime.fromisoformat(after).replace(tzinfo=ZoneInfo(zone))
    found = Cron(expression, zone).next_times(number, moment)
    return [each.astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M%z") for each in found]


def by_cronsim(expression: str, zone: str) -> list[datetime]:
    """Return all times. Cronsim repeats a time where a change skips two; keep one."""
    each = (time.astimezone(UTC) for time in CronSim(expression, START.astimezone(ZoneInfo(zone))))
    return list(dict.fromkeys(takewhile(lambda time: time < END, each)))


def by_cron(expression: str, zone: str) -> list[datetime]:
    cron, found, moment = Cron(expression, zone), [], START
    while (moment := cron.next_after(moment)) and moment < END:
        found.append(moment)
    return found


SCHEDULES = [
    "30 2 * * *",
    "0 0 * * *",
    "15 1,2,3 * * *",
    "0 */3 * * *",
    "5 * * * sun",
    "0 9 * * mon-fri",
    "30 1 L * *",
    "0 3 * * 1#2",
    "30 2 1-7 * 0",
    "0 0 */3 * 1",
    "*/20 2 29 2 *",
    "45 2 * 3,4,10,11 0",
]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", SCHEDULES)
def test_sixteen_months_match_cronsim(expression: str, zone: str):
    assert by_cron(expression, zone) == by_cronsim(expression, zone)


@pytest.mark.parametrize("zone", ZONES)
def test_random_expressions_match_cronsim_around_dst_changes(zone: str):
    chance = random.Random(zone)
    changes = [at for at in by_hours() if offset(at, zone) != offset(at + timedelta(hours=1), zone)]
    moments = [at - timedelta(hours=chance.randint(1, 30)) for at in changes] or [START]
    for number in range(60):
        expression = any_expression(chance)
        moment = moments[number % len(moments)]
        ours = Cron(expression, zone).next_times(12, moment)
        theirs = [
            t.astimezone(UTC)
            for t in islice(CronSim(expression, moment.astimezone(ZoneInfo(zone))), 40)
        ]
        assert ours == list(dict.fromkeys(theirs))[:12], (expression, moment)


def by_hours():
    return (START + timedelta(hours=hour) for hour in range((END - START).days * 24))


def offset(moment: datetime, zone: str):
    return moment.astimezone(ZoneInfo(zone)).utcoffset()


def any_expression(chance: random.Random) -> str:
    def field(least: int, most: int) -> str:
        low, high = sorted(chance.sample(range(least, most + 1), 2))
        step = chance.randint(1, 3)
        return chance.choice(
            ["*", f"*/{step}", f"{low}", f"{low}-{high}", f"{low}-{high}/{step}", f"{low},{high}"]
        )

    hours = chance.choice([field(0, 23), field(0, 4)])
    return " ".join(
        [
            field(0, 59),
            hours,
            chance.choice(["*", field(1, 28)]),
            "*",
            chance.choice(["*", field(0, 6)]),
        ]
    )


@pytest.mark.parametrize(
    "day", [datetime(2026, 4, 4, tzinfo=UTC), datetime(2026, 10, 3, tzinfo=UTC)]
)
@pytest.mark.parametrize("hours", range(1, 5))
def test_steps_are_right_around_half_hour_dst_change(hours: int, day: datetime):
    """Compare with each minute of the clock: cronsim omits some of these times."""
    zone = ZoneInfo("Australia/Lord_Howe")
    clock = [
        (at, at.astimezone(zone))
        for at in (day + timedelta(minutes=minute) for minute in range(1, 2 * 24 * 60))
    ]
    expected = [at for at, local in clock if local.minute in (0, 45) and local.hour % hours == 0]

    assert Cron(f"0,45 */{hours} * * *", zone.key).next_times(len(expected), day) == expected


class TestDst:
    """Debian's rule: fixed times run once a day, and steps follow elapsed time."""

    def test_skipped_fixed_time_runs_at_the_change(self):
        assert times("30 2 * * *", "America/New_York", "2026-03-07T12:00", 2) == [
            "03-08 03:00-0400",
            "03-09 02:30-0400",
        ]

    def test_repeated_fixed_time_runs_at_the_first(self):
        assert times("30 1 * * *", "America/New_York", "2026-10-31T12:00", 2) == [
            "11-01 01:30-0400",
            "11-02 01:30-0500",
        ]

    def test_two_skipped_fixed_times_run_once(self):
        assert times("0,30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", 2) == [
            "03-29 03:00+0200",
            "03-30 02:00+0200",
        ]

    def test_fixed_time_with_seconds_follows_the_same_rules(self):
        assert times("0 30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", 2) == [
            "10-25 02:30+0200",
            "10-26 02:30+0100",
        ]
        assert times("0 30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", 1) == ["03-29 03:00+0200"]

    def test_steps_run_in_both_repeated_hours(self):
        found = times("*/30 * * * *", "Europe/Berlin", "2026-10-25T01:45", 5)

        assert found == [
            "10-25 02:00+0200",
            "10-25 02:30+0200",
            "10-25 02:00+0100",
            "10-25 02:30+0100",
            "10-25 03:00+0100",
        ]

    def test_steps_omit_the_skipped_hour(self):
        assert times("0 */2 * * *", "Europe/Berlin", "2026-03-28T23:00", 2) == [
            "03-29 00:00+0100",
            "03-29 04:00+0200",
        ]

    def test_next_time_from_within_the_repeated_hour(self):
        moment = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)  # The second 02:10 in Berlin.

        assert Cron("30 2 * * *", "Europe/Berlin").next_after(moment) == datetime(
            2026, 10, 26, 1, 30, tzinfo=UTC
        )
        assert Cron("*/30 * * * *", "Europe/Berlin").next_after(moment) == datetime(
            2026, 10, 25, 1, 30, tzinfo=UTC
        )

    def test_fixed_time_of_skipped_day_runs_when_the_next_begins(self):
        assert times("0 9 * * *", "Pacific/Apia", "2011-12-29T10:00", 2) == [
            "12-31 00:00+1400",
            "12-31 09:00+1400",
        ]


class TestExpressions:
    @pytest.mark.parametrize(
        ("alias", "meaning"),
        [
            ("@daily", "0 0 * * *"),
            ("@Hourly", "0 * * * *"),
            ("@weekly", "0 0 * * 0"),
            ("@yearly", "0 0 1 1 *"),
        ],
    )
    def test_alias_equals_its_expression(self, alias: str, meaning: str):
        assert Cron(alias, name="x").next_times(5, START) == Cron(meaning).next_times(5, START)

    def test_first_of_six_fields_is_seconds(self):
        assert shortest_gap(Cron("*/15 * * * * *")) == timedelta(seconds=15)

    def test_range_may_wrap_around(self):
        assert Cron("0 22-2 * * fri-mon").next_times(50, START) == Cron(
            "0 22,23,0,1,2 * * 5,6,0,1"
        ).next_times(50, START)

    def test_h_is_a_stable_hash_of_the_name(self):
        one, other = Cron("H H * * *", name="one"), Cron("H H * * *", name="other")

        assert one.next_after(START) == Cron("H H * * *", name="one").next_after(START)
        assert one.next_after(START) != other.next_after(START)
        assert shortest_gap(Cron("H/15 * * * *", name="one")) == timedelta(minutes=15)

    def test_h_with_a_step_follows_elapsed_time(self):
        found = Cron("H/30 * * * *", "Europe/Berlin", "x").next_times(
            50, datetime(2026, 10, 24, 20, tzinfo=UTC)
        )

        assert {late - early for early, late in pairwise(found)} == {timedelta(minutes=30)}

    @pytest.mark.parametrize(
        ("expression", "why"),
        [
            ("0 0 31 2 *", "never matches"),
            ("0 0 30 feb *", "never matches"),
            ("R 3 * * *", "Write H"),
            ("R(0-5) 3 * * *", "Write H"),
            ("0 0 1 1 * 2027 0", "seven fields"),
            ("0 0 * *", "4 fields"),
            ("", "0 fields"),
            ("0", "has 1 field. Give five"),
            ("@reboot", "has '@reboot'. Give five fields, six with the seconds first, or one of"),
            ("0 0 * * 1-1", "1 alone, or all values"),
            ("0 0 * * mon-mon", "mon alone, or all values"),
            ("0 0 * * sun-0", "sun alone, or all values"),
            ("59/15 * * * *", "59 alone, or from 59 on"),
            ("5/15 * * * *", "Write 5-59/15"),
            ("0 6/1 * * *", "Write 6-23/1"),
            ("*/90 * * * *", "exceeds the range"),
            ("*/60 * * * *", "exceeds the range"),
            ("0 22-2/2 * * *", "List the values"),
            ("0 0 H * *", "H(1-28)"),
            ("0 0 1,* * *", "already includes the other values"),
            ("0 0 15W * mon", "Write * for one"),
            ("0 0 1 * 1#2", "Write * for one"),
            ("99 * * * *", "is not a cron expression: '99' as minutes. Give numbers from 0 to 59"),
            ("0 24 * * *", "'24' as hours. Give numbers from 0 to 23"),
            ("0 9 L7 * *", "'l7' as day of the month. Give numbers from 1 to 31"),
            ("0 9 * 13 *", "'13' as month. Give numbers from 1 to 12, or jan to dec"),
            ("0 9 * * Monday", "'monday' as day of the week. Give numbers from 0 to 7, sun to sat"),
            ("60 0 9 * * *", "'60' as seconds. Give numbers from 0 to 59"),
            ("*/0 * * * *", "'*/0' as minutes. Give"),
            ("0 9 * * mon–fri", "is not a cron expression"),
            ("0 ² * * *", "is not a cron expression: it has '²'. Write digits from 0 to 9"),
            ("*/² * * * *", "it has '²'"),
            ("1-³ * * * *", "it has '³'"),
            ("٣ * * * *", "it has '٣'"),
            (None, "is text such as"),
            ("every day at 9am", "'0 9 * * *' is every day at 9:00"),
            ("every 5 minutes", "use every=timedelta"),
            ("@every 5m", "use every=timedelta"),
            ("daily", "has words"),
            ("Mondays at noon", "'30 17 * * mon' is Monday at 17:30"),
            ("9am", "has words"),
            ("0 9am * * *", "has words"),
        ],
    )
    def test_invalid_or_ambiguous_expression_is_refused_with_reason(
        self, expression: str, why: str
    ):
        with pytest.raises(InvalidSchedule) as error:
            Cron(expression)

        assert why in str(error.value)
        assert repr(expression) in str(error.value)

    @pytest.mark.parametrize("zone", ["Europe/Berlim", "", "../etc/passwd", None, "Europe", "\x00"])
    def test_unknown_time_zone_is_refused(self, zone: str):
        with pytest.raises(InvalidSchedule, match="is not a time zone"):
            Cron("0 9 * * *", zone)

    def test_error_suggests_the_nearest_time_zone(self):
        with pytest.raises(InvalidSchedule, match="Did you mean 'Europe/Berlin'"):
            Cron("0 9 * * *", "Europe/Berlim")


class TestEvery:
    def test_times_do_not_drift_with_late_calls(self):
        five = Every(timedelta(minutes=5))

        assert five.next_after(datetime(2026, 1, 1, 12, 3, 17, tzinfo=UTC)) == datetime(
            2026, 1, 1, 12, 5, tzinfo=UTC
        )
        assert five.next_after(datetime(2026, 1, 1, 12, 5, tzinfo=UTC)) == datetime(
            2026, 1, 1, 12, 10, tzinfo=UTC
        )

    def test_first_time_is_the_anchor(self):
        late = datetime(2026, 1, 1, 12, 0, 7, tzinfo=UTC)

        assert Every(timedelta(minutes=5), anchor=late).next_after(START) == late

    @pytest.mark.parametrize(
        "interval",
        [timedelta(), timedelta(seconds=-5), timedelta(milliseconds=10), timedelta(days=4000), 300],
    )
    def test_invalid_interval_is_refused(self, interval):
        with pytest.raises(InvalidSchedule, match="every must be"):
            Every(interval)


def test_last_times_of_a_long_period_are_found_quickly():
    hourly = Cron("*/5 * * * * *")

    assert last_times(hourly, START, END, 3) == [END - timedelta(seconds=s) for s in (10, 5, 0)]
    yearly = [datetime(year, 1, 1, tzinfo=UTC) for year in (2026, 2027)]
    assert last_times(Cron("0 0 1 1 *"), START, yearly[-1], 2) == yearly
    assert last_times(Cron("0 0 1 1 *"), END, END, 2) == []


@pytest.mark.parametrize(
    ("expression", "zone", "rest"),
    [
        ("CRON_TZ=Europe/Berlin 0 9 * * *", "Europe/Berlin", "0 9 * * *"),
        ("TZ=UTC 0 9 * * *", "UTC", "0 9 * * *"),
        ("0 9 * * * Europe/Rome", "Europe/Rome", "0 9 * * *"),
        ("0 9 * * * utc", "UTC", "0 9 * * *"),
        (
            "30 0 9 * * mon  America/Argentina/Ushuaia",
            "America/Argentina/Ushuaia",
            "30 0 9 * * mon",
        ),
        ("0 9 * * * Japan", "Japan", "0 9 * * *"),
    ],
)
def test_time_zone_in_expression_is_refused_with_remedy(expression, zone, rest):
    with pytest.raises(InvalidSchedule) as error:
        Cron(expression)

    assert f"has a time zone: give it as timezone={zone!r}, beside {rest!r}" in str(error.value)
