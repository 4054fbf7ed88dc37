// Tables. All text from ranks goes into the document by textContent, never as markup.

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// Touching the document costs layout: only what differs is written.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setClass(node, className) {
  if (node.className !== className) node.className = className;
}

function headOf(columns) {
  const head = element("thead");
  const row = head.appendChild(element("tr"));
  for (const column of columns) {
    const cell = row.appendChild(element("th", column.className ?? "", column.title));
    cell.scope = "col";
  }
  return head;
}

// A cell is filled with text, or with {mark, text} where a symbol stands before it.
function fillCell(cell, content) {
  if (typeof content === "string") {
    setText(cell, content);
    return;
  }
  if (!cell.firstElementChild) {
    cell.append(element("span", "mark"), element("span"));
    cell.firstElementChild.setAttribute("aria-hidden", "true");
  }
  setText(cell.firstElementChild, content.mark);
  setText(cell.lastElementChild, content.text);
}

// A short table, all of whose rows are in the document.
class PlainTable {
  constructor(table, columns, emptyText) {
    this.columns = columns;
    this.emptyText = emptyText;
    table.append(headOf(columns));
    this.body = table.appendChild(element("tbody"));
  }

  show(rows) {
    const empty = rows.length === 0;
    if (empty !== Boolean(this.emptyRow)) {
      this.body.replaceChildren();
      this.emptyRow = empty ? this.body.appendChild(element("tr")) : null;
      if (empty) {
        const cell = this.emptyRow.appendChild(element("td", "quiet", this.emptyText));
        cell.colSpan = this.columns.length;
      }
    }
    if (empty) return;
    while (this.body.rows.length > rows.length) this.body.lastElementChild.remove();
    rows.forEach((row, index) => this.fill(this.body.rows[index] ?? this.newRow(), row));
  }

  newRow() {
    const made = this.body.appendChild(element("tr"));
    for (const column of this.columns) made.append(element("td", column.className ?? ""));
    return made;
  }

  fill(line, row) {
    this.columns.forEach((column, index) => fillCell(line.cells[index], column.of(row)));
    setClass(line, row.className ?? "");
  }
}

// A long table: only the rows in view are in the document. They stay in place while their
// scroller scrolls, and show other ranks instead.
class LongTable {
  constructor(scroller, columns, onOpen) {
    Object.assign(this, { scroller, columns, onOpen, rows: [], first: 0 });
    this.spacer = scroller.appendChild(element("div"));
    this.table = this.spacer.appendChild(element("table", "window"));
    this.head = this.table.appendChild(headOf(columns));
    this.body = this.table.appendChild(element("tbody"));
    scroller.addEventListener("scroll", () => this.draw());
    scroller.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(scroller);
  }

  show(rows) {
    this.rows = rows;
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.draw();
  }

  draw() {
    const headHeight = this.head.offsetHeight;
    const rowHeight = this.body.rows[0]?.offsetHeight || 32;
    const room = Math.floor((this.scroller.clientHeight - headHeight) / rowHeight);
    this.visible = Math.max(1, Math.min(room, this.rows.length));
    const height = `${headHeight + this.rows.length * rowHeight}px`;
    if (this.spacer.style.height !== height) this.spacer.style.height = height;
    this.first = Math.min(
      Math.ceil(this.scroller.scrollTop / rowHeight),
      Math.max(0, this.rows.length - this.visible),
    );
    const shown = this.rows.slice(this.first, this.first + this.visible);
    while (this.body.rows.length > shown.length) this.body.lastElementChild.remove();
    shown.forEach((row, index) => this.fill(this.body.rows[index] ?? this.newRow(), row, index));
  }

  newRow() {
    const line = this.body.appendChild(element("tr"));
    for (const column of this.columns) {
      const cell = line.appendChild(element("td", column.className ?? ""));
      if (!column.opens) continue;
      const button = cell.appendChild(element("button"));
      button.type = "button";
      button.append(element("span", "full"), element("span", "short"));
      button.addEventListener("click", () => this.onOpen(line.row));
    }
    return line;
  }

  fill(line, row, index) {
    line.row = row;
    line.setAttribute("aria-rowindex", this.first + index + 2);
    this.columns.forEach((column, at) => {
      const cell = line.cells[at];
      if (!column.opens) {
        fillCell(cell, column.of(row));
        return;
      }
      const [full, short] = cell.firstElementChild.children;
      setText(full, row.name);
      setText(short, row.short);
    });
    setClass(line, row.className ?? "");
  }

  // Up and down go from rank to rank, beyond those in view too.
  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const line = event.target.closest("tr");
    if (!step || !line || event.target === this.scroller) return;
    event.preventDefault();
    const index = line.sectionRowIndex + step;
    if (index < 0 || index >= this.body.rows.length) {
      const rowHeight = line.offsetHeight;
      this.scroller.scrollTop = (this.first + step) * rowHeight;
      this.draw();
    }
    const target = Math.min(Math.max(index, 0), this.body.rows.length - 1);
    this.body.rows[target].querySelector("button").focus({ preventScroll: true });
  }
}
