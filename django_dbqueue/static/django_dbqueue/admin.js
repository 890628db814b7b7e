"use strict";

/* Show the buttons that copy a text, where the clipboard can be written: with HTTPS, or on localhost.
   Without the permission, the text is selected instead. */
const showCopyButtons = (() => {
    const SHOWN_MS = 3000;
    const canCopy = window.isSecureContext && Boolean(navigator.clipboard);

    const announce = (button) => {
        const status = button.parentElement.querySelector(".dbq-copied");
        status.textContent = button.dataset.dbqCopied;
        setTimeout(() => { status.textContent = ""; }, SHOWN_MS);
    };

    document.addEventListener("click", async ({ target }) => {
        const button = target.closest?.(".dbq-copy");
        if (!button) {
            return;
        }
        const text = button.parentElement.querySelector("pre, code");
        try {
            await navigator.clipboard.writeText(text.textContent);
            announce(button);
        } catch {
            document.getSelection().selectAllChildren(text);
        }
    });

    return (within) => {
        within.querySelectorAll(".dbq-copy").forEach((button) => { button.hidden = !canCopy; });
    };
})();
showCopyButtons(document);

/* Reload the parts of a page that have data-dbq-live, each that many seconds, as long as the page has such parts.
   Nothing is loaded while the tab is hidden. What is open stays open, the focus stays, and selected text is left alone. */
(() => {
    const LONGEST = 60;
    let failures = 0;

    const parts = () => [...document.querySelectorAll("[data-dbq-live]")];

    const focusable = (part) => [...part.querySelectorAll("a, button, summary, input, select")];

    const replace = (part, page) => {
        const next = page.getElementById(part.id);
        const selection = document.getSelection();
        if (!next || (!selection.isCollapsed && selection.containsNode(part, true))) {
            return;
        }
        const focused = focusable(part).indexOf(document.activeElement);
        const wasOpen = [...part.querySelectorAll("details")].map((each) => each.open);
        showCopyButtons(next);
        part.replaceWith(next);
        next.querySelectorAll("details").forEach((each, place) => {
            each.open = wasOpen[place] ?? each.open;
        });
        focusable(next)[focused]?.focus({ preventScroll: true });
    };

    const reload = async () => {
        const response = await fetch(window.location.href, { credentials: "same-origin" });
        if (!response.ok || response.redirected) {
            throw new Error(`The page answered ${response.status}.`);
        }
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        parts().forEach((part) => replace(part, page));
    };

    const wait = () => {
        const live = parts();
        if (live.length === 0) {
            return;
        }
        const seconds = Math.min(...live.map((part) => Number(part.dataset.dbqLive) || 10));
        setTimeout(tick, Math.min(seconds * 2 ** failures, LONGEST) * 1000);
    };

    const tick = async () => {
        if (!document.hidden) {
            try {
                await reload();
                failures = 0;
            } catch {
                failures = Math.min(failures + 1, 6);
            }
        }
        wait();
    };

    wait();
})();
