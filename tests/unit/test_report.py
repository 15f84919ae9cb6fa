"""The report: what it says of draws that are known, and that it is one well-formed page that fetches nothing."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from isosgd import Posterior, Target, likelihoods, priors
from isosgd.report import Subject, report_html, write_report
from isosgd.report.chains import agreement, rates
from isosgd.report.plot import Plot, limits, number, ticks

NOISE = 0.3
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Checker(HTMLParser):
    """Every tag closed in its turn; what is asked for from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.headings, self.asked, self.tags = [], [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.asked += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def check(html):
    """Parse a page, and each of its drawings as XML."""
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == [] and checker.asked == []
    assert "script" not in checker.tags and "@import" not in html and "url(" not in html
    drawings = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.get("aria-label"), "every drawing says what it shows"
        _, _, width, height = map(float, root.get("viewBox").split())
        for text in root.iter("text"):
            assert text.get("transform") or (-2 <= float(text.get("x")) <= width + 2 and float(text.get("y")) <= height)
        assert "nan" not in drawing.lower().replace("nanometre", "")
    return checker, drawings


@pytest.fixture
def line(generator):
    """A regression on one input whose posterior is normal, and independent draws of it."""
    x = torch.rand(300, 1, generator=generator) * 4 - 2
    y = 1.5 * x - 0.5 + NOISE * torch.randn(300, 1, generator=generator)
    target = Target.from_module(torch.nn.Linear(1, 1), likelihoods.Gaussian(NOISE), priors.Normal(10.0))
    design = torch.cat([x, torch.ones_like(x)], 1)[:200]
    covariance = torch.linalg.inv(design.T @ design / NOISE**2 + torch.eye(2) / 100)
    mean = covariance @ design.T @ y[:200] / NOISE**2
    draws = mean.T + torch.randn(4, 100, 2, generator=generator) @ torch.linalg.cholesky(covariance).T
    info = {"method": "isgd", "temperature": 1.0, "num_data": 200, "seed": 3, "versions": {"isosgd": "0"}, "warmup": []}
    named = {"weight": draws[..., :1, None], "bias": draws[..., 1:]}
    return Posterior(target, named, info), (x[:200], y[:200]), (x[200:], y[200:])


@pytest.fixture
def classes(generator):
    """Three classes, the largest of three inputs."""
    x = torch.randn(300, 3, generator=generator)
    y = x.argmax(1)
    target = Target.from_module(torch.nn.Linear(3, 3, bias=False), "categorical")
    draws = {"weight": 4 * torch.eye(3) + 0.2 * torch.randn(2, 40, 3, 3, generator=generator)}
    return Posterior(target, draws, {"method": "sgld"}), (x[:200], y[:200]), (x[200:], y[200:])


def test_a_regression_has_verdict_scores_and_all_its_figures(line):
    posterior, data, heldout = line
    html = report_html(
        posterior, data=data, heldout=heldout, subject=Subject("A line", target="height", inputs=["age"])
    )
    checker, drawings = check(html)
    assert checker.headings[:2] == ["A line", "Predictions on held-out rows"]
    # The band, 3 of predictions, 3 traces with ranks, and the temperature. There are no rates without a warm-up.
    assert len(drawings) == 1 + 3 + 6 + 1
    assert html.index("Trust it.") < html.index("Predictions on held-out rows"), "the verdict comes first"
    for words in ("400 draws from 4 chains", "I-SGD", "given 200 rows", "observed height", ">age<", "100 rows that"):
        assert words in html
    error = float((heldout[1] - (1.5 * heldout[0] - 0.5)).square().mean().sqrt())
    shown = float(re.search(r"<dt>RMSE</dt><dd>([\d.]+)", html)[1])
    assert shown == pytest.approx(error, rel=0.05)
    covered = float(re.search(r"<dt>in 95% intervals</dt><dd>([\d.]+)%", html)[1])
    assert abs(covered - 95) < 400 * np.sqrt(0.95 * 0.05 / 100)


def test_a_regression_with_student_t_noise_has_the_same_page(line):
    posterior, data, heldout = line
    target = Target.from_module(torch.nn.Linear(1, 1), likelihoods.StudentT(100.0, scale=NOISE), priors.Normal(10.0))
    pages = [
        report_html(Posterior(t, posterior.draws, {}), data=data, heldout=heldout) for t in (posterior.target, target)
    ]
    assert len(check(pages[1])[1]) == len(check(pages[0])[1])
    for name, near in (("RMSE", 1e-3), ("MNLL", 0.05), ("CRPS", 0.05)):  # the last from 400 outcomes of 100 rows
        normal, student = (float(re.search(rf"<dt>{name}</dt><dd>([\d.]+)", page)[1]) for page in pages)
        assert student == pytest.approx(normal, rel=near)


def test_from_a_trained_network_it_begins_with_whether_that_became_better(classes):
    posterior, data, heldout = classes
    assert "trained network" not in report_html(posterior, data=data, heldout=heldout)
    posterior.starts = [{"weight": 40 * torch.eye(3)}]  # far too sure
    html = report_html(posterior, data=data, heldout=heldout)
    compared = posterior.against_start(*heldout)
    assert html.index("Better than the trained network?") < html.index("Predictions on held-out rows")
    assert f"(ratio {compared.ratio:.3f})" in html and "in the mean of 100 examples, 80 draws: held-out rows." in html
    assert f"<td>{compared.start.nll:.4f}</td>" in html and f"<td>{compared.average.nll:.4f}</td>" in html


def test_units_are_those_of_the_data(line):
    posterior, data, heldout = line
    plain = report_html(posterior, data=data, heldout=heldout)
    scaled = report_html(posterior, data=data, heldout=heldout, subject=Subject(y_mean=50.0, y_scale=10.0))
    rmse = [float(re.search(r"<dt>RMSE</dt><dd>([\d.]+)", html)[1]) for html in (plain, scaled)]
    assert rmse[1] == pytest.approx(10 * rmse[0], rel=0.01)
    covered = [re.search(r"in 95% intervals</dt><dd>([\d.]+)%", html)[1] for html in (plain, scaled)]
    assert covered[0] == covered[1]


def test_chains_apart_are_not_trusted(line):
    posterior, data, heldout = line
    posterior.draws["bias"][0] += 0.3
    html = report_html(posterior, data=data, heldout=heldout, subject=Subject(longer="isosgd fit t.csv --effort 4"))
    check(html)
    assert "Trust it." not in html
    found = float(re.search(r"<dt>largest R-hat</dt><dd>([\d.]+)", html)[1])
    assert found > 1.3


def test_draws_at_the_wrong_temperature_are_named(line):
    posterior, data, heldout = line
    for name, value in posterior.draws.items():
        posterior.draws[name] = value.mean() + 2 * (value - value.mean())
    html = report_html(posterior, data=data, heldout=heldout)
    check(html)
    assert "it samples something else" in html


def test_without_held_out_rows_the_page_says_so(line):
    posterior, data, _ = line
    html = report_html(posterior, data=data)
    check(html)
    assert "Predictions on training rows" in html and "scores are optimistic" in html


def test_without_data_there_is_no_verdict(line):
    posterior, _, heldout = line
    html = report_html(posterior, heldout=heldout)
    check(html)
    assert "No verdict." in html and "The training data, from which" in html


def test_a_classification_has_reliability_confusions_and_entropies(classes):
    posterior, data, heldout = classes
    subject = Subject("Which is largest?", classes=["first", "second", "a <third> & long name"], outside="noise")
    outside = torch.zeros(50, 3)
    html = report_html(posterior, data=data, heldout=heldout, outside=outside, subject=subject)
    checker, drawings = check(html)
    assert "Which is largest?" in checker.headings
    for words in ("Reliability", "Confusion of classes", "noise (50)", "a &lt;third…", "AUROC"):
        assert words in html
    accuracy = float(re.search(r"<dt>accuracy</dt><dd>([\d.]+)%", html)[1])
    assert accuracy > 95
    auroc = float(re.search(r"AUROC, out of distribution</dt><dd>([\d.]+)", html)[1])
    assert auroc > 0.9, "equal inputs have the largest entropy"
    assert len(drawings) == 4 + 6 + 1


def test_one_outcome_of_two_is_a_classification(generator):
    x = torch.randn(120, 1, generator=generator)
    y = (x[:, 0] > 0).float()
    target = Target.from_module(torch.nn.Linear(1, 1, bias=False), "bernoulli")
    draws = {"weight": 5 + 0.3 * torch.randn(2, 30, 1, 1, generator=generator)}
    html = report_html(Posterior(target, draws, {}), data=(x, y))
    check(html)
    assert float(re.search(r"<dt>accuracy</dt><dd>([\d.]+)%", html)[1]) == 100


def test_a_target_of_the_users_own_is_followed_by_its_log_likelihood(generator):
    y = torch.randn(100, generator=generator)
    target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})
    posterior = Posterior(target, {"mu": y.mean() + 0.1 * torch.randn(4, 60, generator=generator)}, {})
    html = report_html(posterior, data=(y,))
    _, drawings = check(html)
    assert "Trust it." in html and len(drawings) >= 7


def test_pairs_of_a_target_that_cannot_predict_give_a_page(generator):
    x = torch.randn(50, 1, generator=generator)
    target = Target(lambda p, b: -0.5 * ((b[1] - p["w"] * b[0]) ** 2).sum(-1), priors.Normal(10.0), init={"w": 0.0})
    draws = {"w": 2 + 0.1 * torch.randn(4, 60, generator=generator)}
    check(report_html(Posterior(target, draws, {}), data=(x, 2 * x)))
    html = report_html(Posterior(None, draws, {}), data=(x, 2 * x))
    check(html)
    assert "The draws came without their target." in html


def test_a_single_chain_has_no_ranks(line):
    posterior, data, heldout = line
    html = report_html(posterior.select([0]), data=data, heldout=heldout)
    check(html)
    assert "from 1 chain of" in html and ": ranks" not in html


def test_few_draws_give_a_page_without_verdict(line):
    posterior, data, heldout = line
    html = report_html(posterior.select(draws=slice(0, 3)), data=data, heldout=heldout)
    check(html)
    assert "No verdict." in html


def test_names_cannot_break_the_page(line):
    posterior, data, heldout = line
    evil = '</svg><script>alert("x")</script>'
    posterior.info["options"] = {evil: evil}
    posterior.info["versions"] = {"isosgd": evil}
    subject = Subject(evil, target=evil, inputs=[evil], notes=[evil], commands=[evil], network=evil, longer=evil)
    html = report_html(posterior, data=data, heldout=heldout, subject=subject)
    checker, _ = check(html)
    assert checker.headings[0] == evil


def test_it_is_written_whole_or_not_at_all(line, tmp_path):
    """Where the system cuts a file short, as on a full disk."""
    resource = pytest.importorskip("resource", reason="this system has no limit on the size of files")
    posterior, data, heldout = line
    path = write_report(posterior, tmp_path / "report.html", data=data, heldout=heldout)
    whole = path.read_text(encoding="utf-8")
    assert whole.endswith("</html>\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_report(posterior, path, data=data, heldout=heldout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text(encoding="utf-8") == whole
    assert list(tmp_path.iterdir()) == [path]


def test_rates_of_layers_are_drawn_for_each_chain():
    groups = [{"name": "0", "rate": 1e-3, "noise_share": 0.2}, {"name": "2", "rate": None, "noise_share": float("nan")}]
    found = rates([{"groups": groups}, {"groups": groups}], Subject(layers={"0": "hidden layer"}))
    assert found.svg.count("<circle") == 2 + 2  # two chains of one layer with a rate, and two of the legend
    assert "hidden layer" in found.svg
    assert rates([], Subject()) is None is rates([{"groups": []}], Subject())


def test_chains_that_are_not_drawn_are_counted():
    """Of the eight chains of `isosgd fit` six were drawn, and nothing said so."""
    draws = np.random.default_rng(0).normal(size=(8, 40, 3))
    for figure in agreement(draws, draws.mean(-1)):
        assert figure.caption.endswith("The first 6 of 8 chains are drawn.")
    assert not any("are drawn" in figure.caption for figure in agreement(draws[:6], draws[:6].mean(-1)))


def test_settings_are_in_order_and_in_words(line):
    posterior, data, _ = line
    target = {"likelihood": {"name": "fit.<locals>.<lambda>", "callable": True}}
    info = posterior.info | {"keep_every": list(range(8, 108)), "target": target}
    more = Posterior(posterior.target, posterior.draws, info)
    html = report_html(more, data=data)
    assert "8 to 107" in html and "a function" in html and "&lt;lambda" not in html


def test_traces_that_never_move_are_left_out():
    assert agreement(np.ones((2, 20, 3)), np.ones((2, 20))) == []


# Drawings


def test_points_are_where_they_belong():
    plot = Plot((0, 10), (0, 1), xticks=[], yticks=[])
    plot.dots([0, 10], [0, 1], "a")
    root = ElementTree.fromstring(plot.svg("two"))
    first, second = root.iter("circle")
    assert float(first.get("cx")) == pytest.approx(plot.left, abs=0.1)
    assert float(first.get("cy")) == pytest.approx(plot.bottom, abs=0.1)
    assert float(second.get("cx")) == pytest.approx(plot.right, abs=0.1)
    assert float(second.get("cy")) == pytest.approx(plot.top, abs=0.1)


def test_what_is_not_finite_does_not_break_an_axis():
    plot = Plot((float("nan"), 1.0), (2.0, 2.0))
    plot.line([0, 1], [2, 2], "a")
    ElementTree.fromstring(plot.svg("flat"))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3e6, 5e6), (1e-7, 9e-7), (99.5, 100.5), (-1, 1e-9)])
def test_ticks_are_few_inside_and_told_apart(low, high):
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 11
    room = 1e-6 * (high - low)
    assert all(low - room <= value <= high + room for value, _ in found)
    assert len({label for _, label in found}) == len(found)


def test_numbers_are_short():
    assert [number(x) for x in (1234.5, 0.5, 1e-6, -2.0, float("nan"))] == ["1,234", "0.5", "1×10⁻⁶", "−2", "–"]
    assert limits([]) == (0.0, 1.0)
