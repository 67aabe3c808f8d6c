"""The connection is cut, by a proxy or because the server is started again: it comes back."""

import json
import re
from collections import defaultdict

from playwright.sync_api import expect

STREAM = re.compile(r"/gpumagic/api/stream")


def test_a_cut_socket_comes_back_and_asks_for_what_it_missed_or_asks_instead_of_it(new_view):
    view, routes, passes = new_view, [], True
    # What was sent each way on each socket; a slow server gets a second one at the start.
    wants, answers = defaultdict(list), defaultdict(list)

    def connect(route):
        if not passes:
            route.close()
            return
        number, server = len(routes), route.connect_to_server()
        routes.append(route)
        route.on_message(lambda text: (wants[number].append(text), server.send(text)))
        server.on_message(lambda text: (answers[number].append(text), route.send(text)))

    def has_history(number):
        return any(json.loads(text)["type"] == "history" for text in answers[number])

    view.page.route_web_socket(STREAM, connect)
    view.load()
    view.open_panel()
    view.shows("H100")
    view.wait_until(lambda: has_history(len(routes) - 1))
    assert any('"since":null' in want for sent in wants.values() for want in sent)
    number = len(routes)
    routes[-1].close()
    view.wait_until(lambda: wants[number])
    assert re.search(r'"since":\d+', wants[number][0])
    view.lab.machine({"gpu.1.util": 64})
    view.shows("64 %")
    # As a proxy does that cuts every one.
    passes = False
    routes[-1].close()
    view.lab.machine({"gpu.1.util": 63})
    view.shows("A proxy cuts the connection")
    view.shows("63 %")
    view.page.unroute_all()


def test_a_server_that_is_started_again_is_seen_again(lab, view):
    # JupyterLab's own word about its server may stay.
    view.spoiled = True
    view.shows("H100")
    lab.stop()
    view.shows("No connection to the Jupyter server")
    expect(view.status).to_have_attribute("title", re.compile("No connection"))
    lab.machine({"gpu.1.util": 62})
    lab.start()
    view.shows("62 %")
    view.hides("No connection")
    assert "cuda:0" in view.says()
