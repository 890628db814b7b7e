"""The file of a role's shared status, in a directory that has space for it or not."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest

from django_dbqueue.runtime.shared_status import SharedStatus


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_space_for_the_file_is_allocated_before_it_is_mapped(folder):
    """A write to a mapped page that has no space ends the process by SIGBUS."""
    status = SharedStatus.create(1000)

    file = (folder / status.name).stat()
    assert file.st_blocks * 512 >= file.st_size == SharedStatus.size(1000)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Only Linux has a device that is full.")
def test_full_directory_is_an_error_that_names_it_and_leaves_no_file(folder, monkeypatch):
    fdopen = os.fdopen

    def on_full_device(fd, mode):
        os.close(fd)
        return fdopen(os.open("/dev/full", os.O_WRONLY), mode)

    monkeypatch.setattr(os, "fdopen", on_full_device)

    with pytest.raises(OSError, match=f"No space left on device: '{folder}") as caught:
        SharedStatus.create(10)

    assert caught.value.errno == errno.ENOSPC
    assert not [*folder.iterdir()]
