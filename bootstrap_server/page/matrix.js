// The matching as a matrix. Only the cells in view are in the document, as in LongTable, in both
// directions; `aria-activedescendant` names the one that the arrow keys have chosen.

const MARKS = { connected: "●", planned: "○", unplanned: "◆", none: "" };
const CELL_PX = 24;
const KEY_STEPS = {
  ArrowDown: [1, 0],
  ArrowUp: [-1, 0],
  ArrowRight: [0, 1],
  ArrowLeft: [0, -1],
  PageDown: [10, 0],
  PageUp: [-10, 0],
  Home: [0, -Infinity],
  End: [0, Infinity],
};

// A class for each factor of 30 above 1 MB/s.
function heatOf(rate) {
  if (rate < 1e6) return "";
  return ` heat${Math.min(4, 1 + Math.floor(Math.log(rate / 1e6) / Math.log(30)))}`;
}

class Matrix {
  constructor(scroller, readout) {
    Object.assign(this, { scroller, readout, rows: [], columns: [], plans: new Map() });
    this.active = { row: 0, column: 0 };
    this.spacer = scroller.appendChild(element("div"));
    this.table = this.spacer.appendChild(element("table", "window"));
    this.table.setAttribute("role", "presentation");
    this.head = this.table.appendChild(element("thead")).appendChild(element("tr"));
    this.head.setAttribute("role", "row");
    this.head.append(element("th"));
    this.body = this.table.appendChild(element("tbody"));
    this.empty = scroller.appendChild(element("p", "empty", "No decode rank is connected."));
    scroller.addEventListener("scroll", () => this.draw());
    scroller.addEventListener("keydown", (event) => this.onKey(event));
    scroller.addEventListener("click", (event) => this.onClick(event));
    scroller.addEventListener("focus", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(scroller.parentElement);
  }

  show(rows, columns, plans) {
    Object.assign(this, { rows, columns, plans });
    this.active.row = Math.min(this.active.row, Math.max(0, rows.length - 1));
    this.active.column = Math.min(this.active.column, Math.max(0, columns.length - 1));
    this.scroller.setAttribute("aria-rowcount", rows.length + 1);
    this.scroller.setAttribute("aria-colcount", columns.length + 1);
    this.draw();
  }

  draw() {
    const empty = this.rows.length === 0 || this.columns.length === 0;
    this.empty.hidden = !empty;
    this.spacer.hidden = empty;
    if (empty) {
      setText(this.readout, "");
      return;
    }
    this.place();
    this.fillHead();
    this.fillBody();
    this.tell();
  }

  // Which rows and columns are in view.
  place() {
    const [corner] = this.head.cells;
    const left = corner.offsetWidth || 144;
    const top = this.head.offsetHeight || 104;
    const width = left + this.columns.length * CELL_PX + 1;
    const height = top + this.rows.length * CELL_PX + 1;
    this.spacer.style.width = `${width}px`;
    this.spacer.style.height = `${height}px`;
    const across = Math.floor((this.scroller.clientWidth - left) / CELL_PX);
    const down = Math.floor((this.scroller.clientHeight - top) / CELL_PX);
    const first = (scrolled, count, room) =>
      Math.min(Math.ceil(scrolled / CELL_PX), Math.max(0, count - room));
    this.across = Math.max(1, Math.min(across, this.columns.length));
    this.down = Math.max(1, Math.min(down, this.rows.length));
    this.left = first(this.scroller.scrollLeft, this.columns.length, this.across);
    this.top = first(this.scroller.scrollTop, this.rows.length, this.down);
  }

  fillHead() {
    while (this.head.cells.length > this.across + 1) this.head.lastElementChild.remove();
    for (let at = 0; at < this.across; at += 1) {
      let cell = this.head.cells[at + 1];
      if (!cell) {
        cell = this.head.appendChild(element("th"));
        cell.setAttribute("role", "columnheader");
      }
      const column = this.columns[this.left + at];
      setText(cell, column.short);
      if (cell.title !== column.name) cell.title = column.name;
    }
  }

  fillBody() {
    while (this.body.rows.length > this.down) this.body.lastElementChild.remove();
    for (let at = 0; at < this.down; at += 1) {
      const line = this.body.rows[at] ?? this.newLine();
      const row = this.rows[this.top + at];
      line.setAttribute("aria-rowindex", this.top + at + 2);
      const head = line.cells[0];
      setText(head, `${STATES[row.now].mark} ${row.short}`);
      const title = `${row.instance} ${row.name} at ${row.where}, ${STATES[row.now].text}`;
      if (head.title !== title) head.title = title;
      setClass(head, row.now);
      this.fillLine(line, row, at);
    }
  }

  newLine() {
    const line = this.body.appendChild(element("tr"));
    line.setAttribute("role", "row");
    line.append(element("th"));
    line.cells[0].setAttribute("role", "rowheader");
    return line;
  }

  fillLine(line, row, at) {
    while (line.cells.length > this.across + 1) line.lastElementChild.remove();
    for (let index = 0; index < this.across; index += 1) {
      let cell = line.cells[index + 1];
      if (!cell) {
        cell = line.appendChild(element("td"));
        cell.setAttribute("role", "gridcell");
        cell.id = `cell-${at}-${index}`;
      }
      const found = cellOf(this.plans, row, this.columns[this.left + index]);
      setText(cell, MARKS[found.kind]);
      const isActive =
        this.top + at === this.active.row && this.left + index === this.active.column;
      cell.removeAttribute("aria-label");
      setClass(cell, `${found.kind}${heatOf(found.rate)}${isActive ? " active" : ""}`);
    }
  }

  // The chosen cell in words.
  tell() {
    const row = this.rows[this.active.row];
    const column = this.columns[this.active.column];
    const cell = cellOf(this.plans, row, column);
    const what = {
      connected: `connected over ${cell.transport}, ${rateText(cell.rate)}`,
      planned: "planned, but not connected",
      unplanned: `connected over ${cell.transport}, ${rateText(cell.rate)}, but not planned`,
      none: "nothing planned, not connected",
    }[cell.kind];
    setText(this.readout, `${row.instance} ${row.name} (${STATES[row.now].text}) → ${column.name}: ${what}`);
    const id = `cell-${this.active.row - this.top}-${this.active.column - this.left}`;
    this.scroller.setAttribute("aria-activedescendant", id);
    document.getElementById(id)?.setAttribute("aria-label", this.readout.textContent);
  }

  onKey(event) {
    const step = KEY_STEPS[event.key];
    if (!step || this.columns.length === 0 || this.rows.length === 0) return;
    event.preventDefault();
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.active.row = within(this.active.row + step[0], this.rows.length);
    this.active.column = within(this.active.column + step[1], this.columns.length);
    this.reveal();
    this.draw();
  }

  reveal() {
    const scroll = (at, first, room) => (at < first ? at : Math.max(first, at - room + 1));
    const top = scroll(this.active.row, this.top, this.down);
    const left = scroll(this.active.column, this.left, this.across);
    if (top !== this.top) this.scroller.scrollTop = top * CELL_PX;
    if (left !== this.left) this.scroller.scrollLeft = left * CELL_PX;
  }

  onClick(event) {
    const cell = event.target.closest("td");
    if (!cell) return;
    this.active.row = this.top + cell.parentElement.sectionRowIndex;
    this.active.column = this.left + cell.cellIndex - 1;
    this.draw();
  }
}
