"""What one group has in common, against another."""

from __future__ import annotations

from django_dbqueue.core.frames import innermost_frame, project_frames
from django_dbqueue.core.in_common import Common, in_common


def test_largest_difference_comes_first():
    members = [[("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("a", 1), ("b", 2)], [("a", 1)]]
    others = [[("a", 2), ("b", 1)], [("a", 2)]]

    assert in_common(members, others) == [Common("a", 1, 1.0, 0.0)]
    assert in_common(members, []) == [Common("a", 1, 1.0, None), Common("b", 1, 0.5, None)]


def test_single_member_is_no_pattern():
    assert in_common([[("a", 1)]], []) == []
    assert in_common([], [[("a", 1)]]) == []


def test_trait_repeated_in_one_member_counts_once():
    assert in_common([[("a", 1), ("a", 1)], [("a", 2)]], []) == []


def test_values_of_other_types_are_others():
    found = in_common([[("a", "1")]] * 2, [[("a", 1)]] * 2)

    assert [(each.value, each.percent, each.percent_elsewhere) for each in found] == [("1", 100, 0)]


def test_number_is_limited():
    members = [[(f"n{number}", 1) for number in range(50)]] * 3

    assert len(in_common(members, [], most=8)) == 8


def test_frames_of_installed_packages_are_left_out():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/json/decoder.py", line 1, in decode\n    x\n'
        '  File "C:\\app\\tasks.py", line 9, in run\n'
        '  File "/app/django_dbqueue/runtime/worker/attempt.py", line 2, in call\n    y\n'
        '  File "/app/shop/models.py", line 3, in save\n    z = 1\n    ~~^~~\n'
        '  File "<string>", line 1, in <module>\n'
        "ValueError: no\n"
    )

    assert project_frames(text) == (
        '  File "C:\\app\\tasks.py", line 9, in run\n'
        '  File "/app/shop/models.py", line 3, in save\n    z = 1\n    ~~^~~'
    )
    assert project_frames("no traceback") == ""


def test_innermost_frame_is_the_projects_if_there_is_one():
    own = '  File "/srv/shop/reports.py", line 40, in build\n    write(rows)\n'
    library = '  File "/usr/lib/python3.11/json/decoder.py", line 7, in decode\n    x\n'

    assert innermost_frame(own + library) == "reports.py:40 build"
    assert innermost_frame(library) == "decoder.py:7 decode"
    assert innermost_frame('  File "C:\\app\\tasks.py", line 9') == "tasks.py:9"
    assert innermost_frame("nothing") == innermost_frame("") == ""
