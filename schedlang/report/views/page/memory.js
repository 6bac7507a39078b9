// What each rank holds over time, below its row: steps, on one scale for all ranks and all schedules of a unit.

Object.assign(Timeline.prototype, {
  level(amount, y) { return y + this.memoryHeight * (1 - Math.max(amount, 0) / (this.mostMemory || 1)); },

  drawMemoryAxis(rank, y) {
    const { pen, colours, schedule } = this, bottom = y + this.memoryHeight;
    pen.fillStyle = colours.muted;
    const peak = schedule.amount(schedule.peaks[rank]);
    pen.fillText(this.isNarrow ? peak : `peak ${peak}`, this.width - this.right + 8, y + this.memoryHeight / 2);
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    const lines = this.memoryHeight >= 24 ? [0, this.mostMemory] : [0];
    for (const amount of lines) {
      const level = Math.round(this.level(amount, y)) + 0.5;
      pen.beginPath();
      pen.moveTo(this.left - 4, level);
      pen.lineTo(this.width - this.right, level);
      pen.stroke();
    }
    if (lines.length < 2) return;
    pen.font = this.font(9.5);
    pen.textAlign = "right";
    pen.fillText(schedule.amount(this.mostMemory), this.left - 7, y + 4);
    pen.fillText("0", this.left - 7, bottom - 3);
  },

  drawMemory(rank, y) {
    const { pen, view, schedule } = this, { first, stop } = schedule.memoryRows[rank];
    const { memoryTime: times, memoryAmount: amounts } = schedule, bottom = y + this.memoryHeight;
    if (first === stop) return;
    let step = firstWhere(first, stop, (each) => times[each] >= view.from) - 1;
    let level = step < first ? bottom : this.level(amounts[step], y);
    pen.beginPath();
    pen.moveTo(this.left, bottom);
    pen.lineTo(this.left, level);
    for (step++; step < stop && times[step] <= view.to;) {
      // Of many steps in one pixel, the highest fills it, and the last goes on.
      const x = this.x(times[step]), column = Math.floor(x);
      let most = -Infinity, last = 0;
      for (; step < stop && Math.floor(this.x(times[step])) === column; step++) {
        last = amounts[step];
        most = Math.max(most, last);
      }
      pen.lineTo(x, level);
      level = this.level(last, y);
      if (most > last) {
        pen.lineTo(x, this.level(most, y));
        pen.lineTo(x + 1, this.level(most, y));
        pen.lineTo(x + 1, level);
      } else pen.lineTo(x, level);
    }
    const end = this.x(step < stop ? view.to : schedule.to);
    pen.lineTo(end, level);
    pen.lineTo(end, bottom);
    pen.fillStyle = this.colours.held;
    pen.globalAlpha = 0.45;
    pen.fill();
    pen.globalAlpha = 1;
  },

  // The value under the pointer, as a point on the curve.
  drawMemoryPoint(rank, time) {
    const { pen, schedule } = this, y = this.y(rank) + this.memoryTop;
    const held = schedule.held(rank, time), level = this.level(held, y), x = this.x(time);
    pen.fillStyle = pen.strokeStyle = this.colours.ink;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(this.left, level);
    pen.lineTo(x, level);
    pen.stroke();
    pen.fillRect(x - 2.5, level - 2.5, 5, 5);
  },
});
