// The components of ops, where costs say of what these are: below the row of a rank a lane for each resource.

Object.assign(Timeline.prototype, {
  // How far below the top of a row a lane is; copies have the first one, if there are any.
  laneTop(lane) {
    return this.barHeight + 2 + LANE * (lane + (this.schedule.copies.length ? 1 : 0));
  },
  // The lane at a place so far below the top of a row, or NONE.
  laneAt(below) {
    return this.schedule.lanes.findIndex((_, lane) => this.laneTop(lane) <= below + 1 && below < this.laneTop(lane) + LANE - 1);
  },

  drawResources(y) {
    const { pen, colours, schedule } = this;
    pen.font = `8px ${FONT}`;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = colours.muted;
    schedule.resources.forEach((resource, lane) => pen.fillText(resource, this.left - 8, y + this.laneTop(lane) + LANE / 2 - 1));
  },

  drawComponents(rank, y) {
    const { pen, schedule } = this;
    schedule.lanes.forEach((rows, lane) => {
      const { first, stop } = this.seenOf(rows[rank], schedule.laneStart, schedule.laneEnd), top = y + this.laneTop(lane);
      let done = -Infinity;
      for (let part = first; part < stop; part++) {
        const end = this.x(schedule.laneEnd[part]), x = Math.max(this.x(schedule.laneStart[part]), done);
        // Of many in one pixel, the first is seen.
        if (end - done < 0.5) continue;
        const box = schedule.laneBox[part];
        pen.globalAlpha = this.isDim(box) ? DIM : 1;
        pen.fillStyle = this.fill(box);
        pen.fillRect(x, top, Math.max(end - x > 3 ? end - x - 1 : end - x, 0.5), LANE - 2);
        done = end;
      }
      pen.globalAlpha = 1;
    });
  },
});
