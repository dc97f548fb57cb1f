"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const KEYS = ["a", "b"]; // the columns' names in the page's address
  const state = { active: 0, together: data.traces.length > 1 };

  /* Small things */

  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const seen = (text) =>
    text.replace(/\n/g, "↵").replace(/\r/g, "␍").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅";
  const tokenText = (id) => seen(data.texts[id] ?? `#${id}`);
  const quoted = (id) => make("span", "text", tokenText(id));
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value === "string" || Number.isInteger(value)) return String(value);
    return Math.abs(value) < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  /* A tree: what follows from its parents and the verdicts */

  function shapeOf(step) {
    const count = step.tokens.length;
    const children = step.tokens.map(() => []);
    const depth = [0];
    const reached = [true];
    for (let node = 1; node < count; node++) {
      const parent = step.parents[node];
      children[parent].push(node);
      depth[node] = depth[parent] + 1;
      reached[node] = reached[parent] && step.allowed[node] === "1";
    }
    children.forEach((each) => each.sort((x, y) => step.log_q[y] - step.log_q[x] || x - y));
    return { children, depth, reached, path: new Set(step.path), strict: new Set(step.strict) };
  }

  /** The nodes with the lines before them, the bonus (node number `count`) behind the path's end. */
  function rowsOf(step, shape) {
    const end = step.path[step.path.length - 1];
    const rows = [];
    const visit = (node, lines, last) => {
      rows.push({ node, lines: node === 0 ? "" : lines + (last ? "└ " : "├ ") });
      if (node === step.tokens.length) return;
      const below = node === 0 ? "" : lines + (last ? "  " : "│ ");
      const next = node === end ? [step.tokens.length, ...shape.children[node]] : shape.children[node];
      next.forEach((child, i) => visit(child, below, i === next.length - 1));
    };
    visit(0, "", true);
    return rows;
  }

  function verdictOf(step, shape, node) {
    if (node === step.tokens.length) return { kind: "bonus", text: "bonus" };
    if (node === 0) return { kind: "root", text: "root" };
    const own = step.exact[node] === "1";
    if (shape.path.has(node)) return own ? { kind: "exact", text: "kept" } : { kind: "relaxed", text: "kept, relaxed" };
    if (step.allowed[node] !== "1") return { kind: "refused", text: "refused" };
    return shape.reached[node] ? { kind: "allowed", text: "allowed" } : { kind: "unreached", text: "not reached" };
  }

  /* A column: one rule's answer and the step that is looked at */

  class Column {
    constructor(trace, index) {
      this.trace = trace;
      this.index = index;
      this.step = -1;
      this.node = 0;
      this.root = document.getElementById("trace").content.firstElementChild.cloneNode(true);
      this.find = (selector) => this.root.querySelector(selector);
      this.root.setAttribute("aria-label", `rule ${trace.rule}`);
      this.find("h2 code").textContent = trace.rule;
      for (const [name, value] of Object.entries(trace.numbers)) {
        const pair = make("div");
        const shown = name === "relaxed share" && value !== null ? `${number(value * 100)}%` : number(value);
        pair.append(make("dt", "", name), make("dd", "", shown));
        this.find(".numbers").append(pair);
      }
      this.firstToken = trace.steps.map(() => 0); // of each step
      this.tokenOf = new Map(); // "step.node" -> its place in the answer
      trace.places.forEach(([step, node], place) => {
        if (step < 0) return;
        if (!this.firstToken[step]) this.firstToken[step] = place;
        const at = trace.kinds[place] === "bonus" ? trace.steps[step].tokens.length : node;
        this.tokenOf.set(`${step}.${at}`, place);
      });
      this.relaxed = trace.kinds.flatMap((kind, place) => (kind === "relaxed" ? [place] : []));
      this.writeAnswer();
      this.find(".count").textContent = trace.steps.length;
      this.find("input").max = trace.steps.length;
      this.listen();
    }

    writeAnswer() {
      const answer = this.find(".answer");
      answer.setAttribute("aria-label", `the answer under ${this.trace.rule}`);
      const all = document.createDocumentFragment();
      this.links = [];
      for (const [start, count, text] of this.trace.pieces) {
        if (data.parting !== null && start <= data.parting && data.parting < start + count) all.append(partingMark());
        const kinds = this.trace.kinds.slice(start, start + count);
        const kind = kinds.includes("relaxed") ? "relaxed" : kinds[0];
        const link = make("a", `token ${kind}`);
        const { step, node } = this.placeOf(start);
        link.href = `#${KEYS[this.index]}=${step + 1}.${node}`;
        link.tabIndex = -1;
        link.dataset.token = start;
        link.title = kind === "first" ? "from the prompt" : kind;
        text.split(/(\n)/).forEach((part) => (part === "\n" ? link.append(make("span", "mark", "↵"), "\n") : link.append(part)));
        for (let i = 0; i < count; i++) this.links[start + i] = link;
        all.append(link);
      }
      if (data.parting !== null && data.parting >= this.trace.tokens.length) all.append(partingMark());
      answer.replaceChildren(all);
      answer.addEventListener("click", (event) => {
        const link = event.target.closest("a.token");
        if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        const { step, node } = this.placeOf(Number(link.dataset.token));
        go(this.index, step, node);
      });
    }

    /** The step and node of a token of the answer; the prefill's is the root of the first tree. */
    placeOf(token) {
      const [step, node] = this.trace.places[token];
      if (step < 0) return { step: 0, node: 0 };
      return { step, node: this.trace.kinds[token] === "bonus" ? this.trace.steps[step].tokens.length : node };
    }

    listen() {
      const moves = {
        first: () => go(this.index, 0),
        back: () => go(this.index, this.step - 1),
        on: () => go(this.index, this.step + 1),
        last: () => go(this.index, this.trace.steps.length - 1),
        "relaxed-back": () => this.goRelaxed(-1),
        "relaxed-on": () => this.goRelaxed(1),
      };
      this.buttons = {};
      for (const button of this.root.querySelectorAll("[data-go]")) {
        this.buttons[button.dataset.go] = button;
        button.addEventListener("click", moves[button.dataset.go]);
      }
      this.moves = moves;
      this.find("input").addEventListener("change", (event) => go(this.index, Number(event.target.value) - 1));
      this.find("tbody").addEventListener("click", (event) => {
        const button = event.target.closest("button");
        if (button) go(this.index, this.step, Number(button.dataset.node));
      });
      this.root.addEventListener("focusin", () => activate(this.index));
    }

    get token() {
      return this.tokenOf.get(`${this.step}.${this.node}`) ?? this.firstToken[this.step];
    }

    goRelaxed(way) {
      const here = this.tokenOf.get(`${this.step}.${this.node}`);
      const from = here ?? this.firstToken[this.step] - (way > 0 ? 1 : 0);
      const found = way > 0 ? this.relaxed.find((place) => place > from) : this.relaxed.findLast((place) => place < from);
      if (found === undefined) return;
      const { step, node } = this.placeOf(found);
      go(this.index, step, node);
    }

    /** What to look at first in a step: its first relaxed token, else the end of its path. */
    notable(step) {
      const { path, exact } = this.trace.steps[step];
      return path.slice(1).find((node) => exact[node] === "0") ?? path[path.length - 1];
    }

    show(step, node) {
      if (!this.trace.steps.length) {
        this.find(".told").textContent = "The answer ended with the prefill's token: there was no step.";
        this.find(".tree").hidden = true;
        Object.values(this.buttons).forEach((button) => (button.disabled = true));
        this.find("input").disabled = true;
        return;
      }
      step = clamp(Number.isFinite(step) ? step : 0, 0, this.trace.steps.length - 1);
      const moved = step !== this.step;
      this.step = step;
      this.node = clamp(node ?? this.notable(step), 0, this.trace.steps[step].tokens.length);
      const inTree = this.find("tbody").contains(document.activeElement);
      if (moved) this.drawTree();
      this.mark(inTree);
      this.explain();
    }

    drawTree() {
      const step = this.trace.steps[this.step];
      const shape = (this.shape = shapeOf(step));
      const body = document.createDocumentFragment();
      this.order = [];
      for (const { node, lines } of rowsOf(step, shape)) {
        this.order.push(node);
        body.append(this.row(step, shape, node, lines));
      }
      this.find("tbody").replaceChildren(body);
      this.find(".tree").scrollTop = 0;
      const kept = step.path.length - 1;
      const strict = step.strict.length - 1;
      const told = this.find(".told");
      told.replaceChildren(
        `${kept} of ${step.tokens.length - 1} drafted tokens kept; exact acceptance would have kept ${strict}. Bonus: `,
        quoted(step.bonus),
      );
      const end = this.firstToken[this.step + 1] ?? this.trace.tokens.length;
      const committed = end - this.firstToken[this.step];
      if (committed <= kept) told.append(` The answer ends with token ${committed} of them.`);
      this.find("input").value = this.step + 1;
      this.buttons.first.disabled = this.buttons.back.disabled = this.step === 0;
      this.buttons.last.disabled = this.buttons.on.disabled = this.step === this.trace.steps.length - 1;
      const links = this.links;
      this.now?.forEach((link) => link.classList.remove("now"));
      this.now = new Set(links.slice(this.firstToken[this.step], end));
      this.now.forEach((link) => link.classList.add("now"));
    }

    row(step, shape, node, lines) {
      const verdict = verdictOf(step, shape, node);
      const bonus = verdict.kind === "bonus";
      const row = make("tr", shape.path.has(node) || bonus ? `path ${verdict.kind}` : verdict.kind);
      row.dataset.node = node;
      const button = make("button", "", tokenText(bonus ? step.bonus : step.tokens[node]));
      button.type = "button";
      button.dataset.node = node;
      button.tabIndex = -1;
      const name = make("td");
      name.append(make("span", "branch", lines), button);
      name.firstChild.ariaHidden = "true";
      const said = make("td");
      said.append(make("span", `chip ${verdict.kind}`, verdict.text));
      if (node > 0 && step.exact[node] === "1") said.append(make("span", "chip own", "target's own"));
      if (node > 0 && shape.strict.has(node)) said.append(make("span", "chip strict", "exact path"));
      const parent = step.parents[node];
      const q = Math.exp(step.log_q[node] - step.log_q[parent]);
      const numbers = bonus
        ? [step.choice_p[step.path[step.path.length - 1]], null, null]
        : node === 0 ? [null, null, null] : [step.p[node], step.ranks[node] + 1, q];
      row.append(name, ...numbers.map((value) => make("td", "", number(value))), said);
      return row;
    }

    mark(inTree) {
      const body = this.find("tbody");
      for (const row of body.querySelectorAll("tr.picked")) {
        row.classList.remove("picked");
        row.querySelector("button").tabIndex = -1;
        row.querySelector("button").removeAttribute("aria-current");
      }
      const row = body.querySelector(`tr[data-node="${this.node}"]`);
      const button = row.querySelector("button");
      row.classList.add("picked");
      button.tabIndex = 0;
      button.setAttribute("aria-current", "true");
      if (inTree) button.focus({ preventScroll: true });
      const head = this.find("thead").offsetHeight;
      scrollInto(this.find(".tree"), row.offsetTop - head, row.offsetHeight + head);

      this.here?.classList.remove("here");
      if (this.here) this.here.tabIndex = -1;
      const link = this.links[this.token];
      const exactly = this.tokenOf.has(`${this.step}.${this.node}`);
      this.here = link;
      if (exactly) link.classList.add("here");
      link.tabIndex = 0;
      scrollInto(this.find(".answer"), link.offsetTop, link.offsetHeight);
      const from = this.tokenOf.get(`${this.step}.${this.node}`);
      this.buttons["relaxed-on"].disabled = !this.relaxed.some((place) => place > (from ?? this.firstToken[this.step] - 1));
      this.buttons["relaxed-back"].disabled = !this.relaxed.some((place) => place < (from ?? this.firstToken[this.step]));
    }

    /** Why the picked node has its verdict. */
    explain() {
      const step = this.trace.steps[this.step];
      const { node, shape } = this;
      const why = make("div");
      const bonus = node === step.tokens.length;
      const title = make("h3");
      title.append(quoted(bonus ? step.bonus : step.tokens[node]), ` ${verdictOf(step, shape, node).text}`);
      why.append(title);
      const said = make("p");
      const above = bonus ? step.path[step.path.length - 1] : step.parents[node];
      if (bonus) {
        said.append(`The target's own token behind the accepted path, with p ${number(step.choice_p[above])}.`);
      } else if (node === 0) {
        said.append("The last token of the answer so far. After it the target says ", ...this.wanted(step, 0));
      } else {
        said.append(...this.sentences(step, shape, node));
        const facts = make("dl");
        const q = Math.exp(step.log_q[node] - step.log_q[above]);
        for (const [name, value] of [
          ["p(x)", number(step.p[node])],
          ["rank", number(step.ranks[node] + 1)],
          ["q(x)", number(q)],
          ["draft score", `${number(step.log_q[node])} nats`],
          ["depth", shape.depth[node]],
          ["node", node],
        ]) {
          const pair = make("div");
          pair.append(make("dt", "", name), make("dd", "", value));
          facts.append(pair);
        }
        why.append(facts);
      }
      title.after(said);
      if (node > 0 && !bonus && step.scores.length) why.append(this.scores(step, node));
      this.find(".why").replaceChildren(...why.childNodes);
    }

    sentences(step, shape, node) {
      const parent = step.parents[node];
      const told = [];
      if (step.exact[node] === "1") told.push("It is what the target itself says after ", quoted(step.tokens[parent]), ".");
      else told.push("After ", quoted(step.tokens[parent]), " the target says ", ...this.wanted(step, parent));
      if (step.eligible[node] === "0") told.push(" A stop token is kept only where it is the target's own.");
      else if (step.allowed[node] !== "1") told.push(" The rule refuses the token.");
      else if (shape.path.has(node)) told.push(" The rule allows the token, and the kept path holds it.");
      else if (shape.reached[node]) told.push(" The rule allows the token, but another path is longer or has a higher draft score.");
      else told.push(" The rule allows the token, but not one before it.");
      return told;
    }

    wanted(step, node) {
      const told = [quoted(step.choice[node]), ` (p ${number(step.choice_p[node])})`];
      if (step.sayable !== null && step.sayable[node] === "0") told.push(", which the draft's vocabulary does not have");
      return [...told, "."];
    }

    scores(step, node) {
      const table = make("table", "scores");
      table.append(make("caption", "", `What ${this.trace.rule} looks at`));
      for (const score of step.scores) {
        const row = make("tr");
        row.append(make("th", "", score.name));
        row.firstChild.scope = "row";
        const shown = (value) => {
          if (value === null) return document.createTextNode("–");
          if (score.token) return quoted(value);
          const also = score.name.endsWith("ln p(x)") && typeof value === "number" ? ` (${number(Math.exp(value))})` : "";
          return document.createTextNode(number(value) + also);
        };
        const value = make("td");
        value.append(shown(score.values[node]));
        row.append(value);
        if (score.relation) {
          const bound = make("td");
          bound.append(`${score.relation} `, shown(Array.isArray(score.bounds) ? score.bounds[node] : score.bounds));
          const holds = score.holds[node] === "1";
          row.append(bound, make("td", "", holds ? "✓ holds" : "✗ fails"));
        }
        table.append(row);
      }
      return table;
    }
  }

  const partingMark = () => make("span", "parting", "the answers part here");

  function scrollInto(panel, top, height) {
    if (top < panel.scrollTop) panel.scrollTop = top;
    else if (top + height > panel.scrollTop + panel.clientHeight) panel.scrollTop = top + height - panel.clientHeight;
  }

  /* Moving */

  function activate(index) {
    state.active = index;
    columns.forEach((column, i) => column.root.classList.toggle("active", i === index));
  }

  /** Look at a step of one column; together, the other shows where its answer is as long. */
  function go(index, step, node) {
    const column = columns[index];
    const before = column.step;
    activate(index);
    column.show(step, node);
    if (state.together && column.step !== before) follow(column);
    writeAddress();
  }

  /** Move the others to where their answers are as long. */
  function follow(column) {
    for (const other of columns.filter((each) => each !== column)) {
      const place = clamp(column.firstToken[column.step] ?? 0, 0, other.trace.tokens.length - 1);
      other.show(other.placeOf(place).step);
    }
  }

  const address = () =>
    `#${columns.map((each, i) => `${KEYS[i]}=${each.step + 1}.${each.node}`).join("&")}${state.active ? "&on=b" : ""}`;

  function writeAddress() {
    history.replaceState(null, "", address());
  }

  function readAddress() {
    const said = new URLSearchParams(location.hash.slice(1));
    const places = columns.map((_, i) => /^(\d+)(?:\.(\d+))?$/.exec(said.get(KEYS[i]) ?? ""));
    const named = columns.filter((_, i) => places[i]);
    columns.forEach((column, i) => {
      if (!places[i]) return column.show(Math.max(column.step, 0));
      const [, step, node] = places[i];
      return column.show(Number(step) - 1, node === undefined ? undefined : Number(node));
    });
    if (named.length === 1 && state.together) follow(named[0]);
    activate(said.get("on") === "b" && columns.length > 1 ? 1 : columns.indexOf(named[0] ?? columns[0]));
    writeAddress();
  }

  function moveInTree(column, way) {
    const at = column.order.indexOf(column.node) + way;
    if (at >= 0 && at < column.order.length) go(column.index, column.step, column.order[at]);
  }

  function setTogether(value) {
    state.together = value;
    document.getElementById("together").setAttribute("aria-pressed", String(value));
  }

  const help = document.getElementById("help");
  const toggleHelp = () => (help.open ? help.close() : help.showModal());

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "?") {
      event.preventDefault();
      toggleHelp();
      return;
    }
    if (help.open || event.target.closest("input")) return;
    const column = columns[state.active];
    const two = columns.length > 1;
    const inTree = event.target.closest("tbody") !== null;
    const keys = {
      ArrowLeft: column.moves.back, k: column.moves.back,
      ArrowRight: column.moves.on, j: column.moves.on,
      Home: column.moves.first, End: column.moves.last,
      n: column.moves["relaxed-on"], p: column.moves["relaxed-back"],
      ...(inTree && { ArrowUp: () => moveInTree(column, -1), ArrowDown: () => moveInTree(column, 1) }),
      ...(two && { x: () => { activate(1 - state.active); writeAddress(); }, t: () => setTogether(!state.together) }),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }

  const columns = data.traces.map((trace, index) => new Column(trace, index));
  document.getElementById("traces").append(...columns.map((column) => column.root));
  document.getElementById("together")?.addEventListener("click", () => setTogether(!state.together));
  document.getElementById("ask").addEventListener("click", toggleHelp);
  document.getElementById("close").addEventListener("click", toggleHelp);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", readAddress);
  readAddress();
})();
