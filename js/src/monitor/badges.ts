/** Words in a frame. */

import { Field, h, Rows, show } from './dom.js';
import type { Badge } from './words.js';

class BadgeNode {
  #field = new Field();
  readonly node = this.#field.node;

  update([text, look]: Badge): void {
    this.#field.say(text).look(`badge ${look}`).hint(text);
  }
}

export class Badges {
  readonly node = h('span', 'badges');
  #rows = new Rows<Badge, BadgeNode>(this.node, () => new BadgeNode());

  update(badges: Badge[]): void {
    this.#rows.update(badges.map((badge, n) => [String(n), badge] as const));
    show(this.node, badges.length > 0);
  }
}
