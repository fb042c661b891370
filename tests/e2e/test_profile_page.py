"""The page of a profile, opened in headless Chromium: it shows its matrices, quietly, offline."""

from __future__ import annotations

import dataclasses

import pytest

from tests.e2e.test_report_page import BROWSER, browse, console
from tests.support.measured import measured_profile
from tutti.report.profile import write_profile_page

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)


@pytest.mark.parametrize(
    "flags", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"]
)
def test_the_page_draws_without_errors_or_requests(tmp_path, flags):
    path = tmp_path / "profile.html"
    write_profile_page(path, dataclasses.replace(measured_profile(), chip="<H200>"))
    dom, log = browse(path, tmp_path, *flags)
    assert console(log) == []
    assert "<h1>Profile of &lt;H200&gt;</h1>" in dom
    assert dom.count('class="table heat"') == 3 + 2 + 1
    assert "gradient of the weight" in dom
